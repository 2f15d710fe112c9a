/* Attention within each protein of a packed batch, on one thread.
 *
 * attention.py calls it and documents the arrays. Each head of a protein is computed alone, in
 * float32, so its bits do not depend on the rest of the batch. Keys are transposed, so that scores
 * and results are products of the same form.
 */

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

enum { ROWS = 8 }; /* queries at once */

/* A head of one protein. Rows of keys and values are padded with zeros to whole vectors. */
typedef struct {
    int64_t n_tokens, n_keys, dim, width;      /* n_keys and width: in whole vectors */
    float *keys, *values;                      /* (dim, n_keys), (n_keys, width) */
    float *queries, *scores, *out;             /* (ROWS, dim), (ROWS, n_keys), (ROWS, width) */
} Head;

/* The projected tokens of a batch: (n_tokens, 3, n_heads, dim). */
typedef struct {
    const void *projected;
    void *out; /* (n_tokens, n_heads, dim) */
    const float *cos, *sin; /* of positions, (n_tokens, dim) and (n_tokens, dim / 2) */
    int64_t n_heads, dim;
    int is_bf16;
} Batch;

static int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Load a row as float32. The row of the next head is prefetched: processors do not foresee it. */
INLINE void load(const Batch *batch, int64_t first, float *restrict numbers) {
    int64_t next = (first + batch->dim) * (batch->is_bf16 ? 2 : 4);
    __builtin_prefetch((const char *)batch->projected + next);
    const float *restrict floats = (const float *)batch->projected + first;
    const uint16_t *restrict halves = (const uint16_t *)batch->projected + first;
    for (int64_t i = 0; i < batch->dim; i++) {
        uint32_t bits = batch->is_bf16 ? (uint32_t)halves[i] << 16 : 0;
        memcpy(numbers + i, batch->is_bf16 ? (const void *)&bits : floats + i, sizeof bits);
    }
}

/* Scale and store a row; bf16 is rounded half to even. */
INLINE void store(const Batch *batch, int64_t first, const float *restrict numbers, float scale) {
    float *restrict floats = (float *)batch->out + first;
    uint16_t *restrict halves = (uint16_t *)batch->out + first;
    for (int64_t i = 0; i < batch->dim; i++) {
        float number = numbers[i] * scale;
        uint32_t bits;
        if (!batch->is_bf16) {
            floats[i] = number;
            continue;
        }
        memcpy(&bits, &number, sizeof bits);
        bits = number == number ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fc00000;
        halves[i] = (uint16_t)(bits >> 16);
    }
}

/* Load a query or key and turn it by its position (Su et al. 2021, eq. 34). */
INLINE void load_turned(const Batch *batch, int64_t first, int64_t position, float scale,
                        float *restrict turned) {
    int64_t half = batch->dim / 2;
    float numbers[batch->dim];
    const float *restrict low = numbers, *restrict high = numbers + half;
    const float *restrict cos = batch->cos + position * batch->dim;
    const float *restrict sin = batch->sin + position * half;
    load(batch, first, numbers);
    for (int64_t i = 0; i < half; i++)
        turned[i] = (low[i] * cos[i] - high[i] * sin[i]) * scale;
    for (int64_t i = 0; i < half; i++)
        turned[half + i] = (high[i] * cos[i] + low[i] * sin[i]) * scale;
}

/* Multiply ROWS rows by n_vectors columns of vectors. */
INLINE void multiply(const float *restrict a, int64_t a_stride, const float *restrict b,
                     int64_t b_stride, int64_t n_inner, float *restrict out,
                     const int n_vectors) {
    Vector sums[ROWS][3] = {{{0}}};
    for (int64_t inner = 0; inner < n_inner; inner++) {
        Vector columns[3];
#pragma GCC unroll 3
        for (int v = 0; v < n_vectors; v++)
            memcpy(&columns[v], b + inner * b_stride + v * LANES, sizeof(Vector));
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 3
            for (int v = 0; v < n_vectors; v++)
                sums[row][v] += a[row * a_stride + inner] * columns[v];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 3
        for (int v = 0; v < n_vectors; v++)
            memcpy(out + row * b_stride + v * LANES, &sums[row][v], sizeof(Vector));
    }
}

INLINE void product(const float *restrict a, int64_t a_stride, const float *restrict b,
                    int64_t b_stride, int64_t n_inner, float *restrict out) {
    int64_t column = 0;
    for (; column + 3 * LANES <= b_stride; column += 3 * LANES)
        multiply(a, a_stride, b + column, b_stride, n_inner, out + column, 3);
    if (column + 2 * LANES <= b_stride)
        multiply(a, a_stride, b + column, b_stride, n_inner, out + column, 2);
    else if (column < b_stride)
        multiply(a, a_stride, b + column, b_stride, n_inner, out + column, 1);
}

/* Replace scores, which are base-2 logarithms, by their exponentials, relative to the largest.
 * Returns the sum. It is NaN if a score is NaN or infinite, and so is the result of the query. */
INLINE float exponentials(float *restrict scores, int64_t n) {
    Vector most, sums = {0}, one, least = sums - 126;
    memcpy(&most, scores, sizeof most);
    for (int64_t i = LANES; i < n; i += LANES) {
        memcpy(&one, scores + i, sizeof one);
        most = larger(one, most);
    }
    most = largest_of(most);
    for (int64_t i = 0; i < n; i += LANES) {
        memcpy(&one, scores + i, sizeof one);
        one -= most;
        sums += one - one; /* 0, or NaN */
        one = exp2_of(larger(one, least));
        sums += one;
        memcpy(scores + i, &one, sizeof one);
    }
    return sum_of(sums);
}

INLINE void attend_head(const Batch *batch, Head *head, int64_t first, int64_t start,
                        int64_t number) {
    int64_t n = head->n_tokens, dim = head->dim, n_keys = head->n_keys, width = head->width;
    int64_t row_of_heads = batch->n_heads * dim, row = 3 * row_of_heads;
    int64_t from = start * row + number * dim;
    float key[dim];
    for (int64_t i = 0; i < n; i++) {
        load_turned(batch, from + i * row + row_of_heads, first + i, 1, key);
        for (int64_t place = 0; place < dim; place++)
            head->keys[place * n_keys + i] = key[place];
        load(batch, from + i * row + 2 * row_of_heads, head->values + i * width);
    }
    float scale = 1.44269504F / __builtin_sqrtf((float)dim);
    for (int64_t query = 0; query < n; query += ROWS) {
        int64_t n_rows = n - query < ROWS ? n - query : ROWS;
        for (int64_t i = 0; i < n_rows; i++)
            load_turned(batch, from + (query + i) * row, first + query + i, scale,
                        head->queries + i * dim);
        product(head->queries, dim, head->keys, n_keys, dim, head->scores);
        float sums[ROWS];
        for (int64_t i = 0; i < n_rows; i++) {
            float *scores = head->scores + i * n_keys;
            for (int64_t key = n; key < n_keys; key++)
                scores[key] = -FLT_MAX;
            sums[i] = exponentials(scores, n_keys);
        }
        product(head->scores, n_keys, head->values, width, n, head->out);
        for (int64_t i = 0; i < n_rows; i++)
            store(batch, (start + query + i) * row_of_heads + number * dim,
                  head->out + i * width, 1 / sums[i]);
    }
}

/* Allocate a head, with zeros after keys and values. Returns NULL if memory runs out. */
static float *open_head(Head *head, int64_t n_tokens, int64_t dim) {
    head->n_tokens = n_tokens, head->dim = dim;
    head->n_keys = whole(n_tokens), head->width = whole(dim);
    int64_t n_rows = dim + head->width + ROWS;
    float *room = calloc((size_t)(n_rows * head->n_keys + ROWS * (dim + head->width)), 4);
    head->keys = room;
    if (room) {
        head->values = head->keys + dim * head->n_keys;
        head->scores = head->values + head->width * head->n_keys;
        head->queries = head->scores + ROWS * head->n_keys;
        head->out = head->queries + ROWS * dim;
    }
    return room;
}

INLINE int attend_all(const Batch *batch, const int64_t *runs, int64_t n_runs) {
    for (const int64_t *run = runs; run < runs + 3 * n_runs; run += 3) {
        Head head;
        if (!open_head(&head, run[2], batch->dim))
            return -1;
        for (int64_t protein = 0; protein < run[1]; protein++)
            for (int64_t number = 0; number < batch->n_heads; number++)
                attend_head(batch, &head, run[0], run[0] + protein * run[2], number);
        free(head.keys);
    }
    return 0;
}

typedef int Attend(const Batch *batch, const int64_t *runs, int64_t n_runs);

static int attend_plain(const Batch *batch, const int64_t *runs, int64_t n_runs) {
    return attend_all(batch, runs, n_runs);
}

#if defined(__x86_64__) && !defined(PORTABLE)
AVX512 static int attend_avx512(const Batch *batch, const int64_t *runs, int64_t n_runs) {
    return attend_all(batch, runs, n_runs);
}

static Attend *fastest(void) { return supports_avx512() ? attend_avx512 : attend_plain; }
#else
static Attend *fastest(void) { return attend_plain; }
#endif

static Attend *attend_here;

__attribute__((constructor)) static void choose_attend(void) { attend_here = fastest(); }

int attend(const void *projected, int is_bf16, const float *cos, const float *sin,
           const int64_t *runs, int64_t n_runs, int64_t n_heads, int64_t dim, void *out) {
    Batch batch = {projected, out, cos, sin, n_heads, dim, is_bf16};
    return attend_here(&batch, runs, n_runs);
}
