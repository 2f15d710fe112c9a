/* Attention in products of bf16 numbers, for processors with AVX512_BF16, on one thread.
 *
 * attention.py calls it and documents the arrays. An instruction multiplies two pairs of bf16
 * numbers, and adds both products to a float32 number. Queries and keys are turned in float32 and
 * then rounded. Scores are float32, and so are all sums. The weights of the keys are rounded before
 * they are summed. Each head of a protein is computed alone, so its bits do not depend on the rest
 * of the batch.
 *
 * Vectors have one number, or one pair, for each of LANES queries. So the largest score and the sum
 * of the weights take no steps across lanes, and heads of any even dimension need no padding.
 */

#include <float.h>
#include <stdint.h>
#include <stdlib.h>

#include "vectors.h"

#if defined(__clang__)
#define KNOWS_BF16 (__clang_major__ >= 9)
#else
#define KNOWS_BF16 (__GNUC__ >= 10)
#endif

#if defined(__x86_64__) && !defined(PORTABLE) && KNOWS_BF16

#include <immintrin.h>

#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define INLINE_BF16 BF16 INLINE

/* Two bf16 numbers in each lane. */
typedef int32_t Pairs __attribute__((vector_size(4 * LANES), may_alias));

/* A head of one protein. Queries, keys and values have rows of dim numbers. */
typedef struct {
    const uint16_t *queries, *keys, *values;
    uint16_t *out;
    const float *cos, *sin; /* of positions, (n_tokens, dim) and (n_tokens, dim / 2) */
    int64_t n_tokens, dim;
    int64_t stride, out_stride; /* numbers from one row to the next */
} Head;

/* Memory for the heads of a run. Its pairs of keys and of dimensions are pairs of bf16 numbers. */
typedef struct {
    int64_t n_keys, width; /* n_keys: in whole vectors; width: dim in multiples of 8 */
    Pairs *keys;           /* pairs of dimensions, (n_keys / LANES, dim / 2, LANES) */
    int32_t *values;       /* pairs of keys, (n_keys / 2, width), with zeros after them */
    Pairs *queries;        /* pairs of dimensions, (dim / 2, LANES) */
    Vector *scores;        /* (n_keys, LANES); then weights: pairs of keys, (n_keys / 2, LANES) */
    Vector *out;           /* (width, LANES) */
} Room;

INLINE int64_t round_up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

INLINE __mmask16 first_lanes(int64_t n) { return (__mmask16)(n < LANES ? (1 << n) - 1 : -1); }

INLINE_BF16 Pairs lane_numbers(void) {
    return (Pairs){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

INLINE_BF16 Vector add_products(Vector sums, Pairs a, Pairs b) {
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

/* Round numbers to bf16. Those of `low` become the lower halves of the pairs. */
INLINE_BF16 Pairs pairs_of(Vector low, Vector high) {
    Pairs order = lane_numbers() | (lane_numbers() + LANES) << 16;
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (Pairs)_mm512_permutexvar_epi16((__m512i)order, halves);
}

/* Load bf16 numbers into the lower halves of pairs. */
INLINE_BF16 Pairs load_halves(const uint16_t *numbers, __mmask16 lanes) {
    return (Pairs)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, numbers));
}

INLINE_BF16 Vector load_bf16(const uint16_t *numbers, __mmask16 lanes) {
    return (Vector)(load_halves(numbers, lanes) << 16);
}

INLINE_BF16 Vector load_float32(const float *numbers, __mmask16 lanes) {
    return (Vector)_mm512_maskz_loadu_ps(lanes, numbers);
}

/* 2^x with a relative error of at most 3e-6. It is NaN if x is NaN or infinite. */
INLINE_BF16 Vector power_of_2(Vector x) {
    Vector rest = x - (Vector)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    Vector whole = x - rest; /* not infinite, which would turn NaN into 0 */
    Vector power = 9.5700579e-3F * rest + 5.5917778e-2F;
    power = power * rest + 2.4024745e-1F;
    power = power * rest + 6.9312183e-1F;
    power = power * rest + 9.9999926e-1F;
    return (Vector)_mm512_scalef_ps((__m512)power, (__m512)whole);
}

/* Exchange rows and columns, in steps that exchange quarters of ever larger squares. */
INLINE_BF16 void transpose(Pairs rows[LANES]) {
    Pairs lanes = lane_numbers();
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        Pairs is_from_second = (lanes & step) != 0;
        __m512i upper = (__m512i)((lanes & ~step) | (is_from_second & LANES));
        __m512i lower = (__m512i)(lanes | step | (is_from_second & LANES));
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) {
            if (row & step)
                continue;
            __m512i first = (__m512i)rows[row];
            __m512i second = (__m512i)rows[row + step];
            rows[row] = (Pairs)_mm512_permutex2var_epi32(first, upper, second);
            rows[row + step] = (Pairs)_mm512_permutex2var_epi32(first, lower, second);
        }
    }
}

/* Load the rows of LANES tokens, turn them by their positions (Su et al. 2021, eq. 34), and round
 * them. Pairs have one dimension of each half. The last token is repeated. -> (dim / 2, LANES) */
INLINE_BF16 void load_turned(const Head *head, const uint16_t *rows, int64_t first, float scale,
                             Pairs *restrict turned) {
    int64_t half = head->dim / 2;
    for (int64_t start = 0; start < half; start += LANES) {
        __mmask16 lanes = first_lanes(half - start);
        Pairs pairs[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t token = first + i < head->n_tokens ? first + i : head->n_tokens - 1;
            const uint16_t *row = rows + token * head->stride + start;
            Vector low = load_bf16(row, lanes);
            Vector high = load_bf16(row + half, lanes);
            Vector cos = load_float32(head->cos + token * head->dim + start, lanes) * scale;
            Vector sin = load_float32(head->sin + token * half + start, lanes) * scale;
            pairs[i] = pairs_of(low * cos - high * sin, high * cos + low * sin);
            /* the same row of the next head, which processors do not foresee */
            __builtin_prefetch(row + head->dim);
            __builtin_prefetch(row + head->dim + half);
        }
        transpose(pairs);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (start + i < half)
                turned[start + i] = pairs[i];
    }
}

/* Load the values of all keys. */
INLINE_BF16 void load_values(const Head *head, const Room *room) {
    for (int64_t key = 0; key < head->n_tokens; key += 2) {
        const uint16_t *row = head->values + key * head->stride;
        int32_t *values = room->values + key / 2 * room->width;
        int is_pair = key + 1 < head->n_tokens;
        for (int64_t start = 0; start < head->dim; start += LANES) {
            __mmask16 lanes = first_lanes(head->dim - start);
            Pairs pairs = load_halves(row + start, lanes);
            if (is_pair)
                pairs |= load_halves(row + head->stride + start, lanes) << 16;
            _mm512_mask_storeu_epi32(values + start, lanes, (__m512i)pairs);
            __builtin_prefetch(row + head->dim + start);
            __builtin_prefetch(row + head->stride + head->dim + start);
        }
    }
}

/* Multiply rows, (n_rows, LANES), by columns, (n_rows, stride). -> (n_columns, LANES) */
INLINE_BF16 void multiply(const Pairs *restrict rows, const int32_t *restrict columns,
                          int64_t stride, int64_t n_rows, Vector *restrict sums,
                          const int n_columns) {
#pragma GCC unroll 24
    for (int column = 0; column < n_columns; column++)
        sums[column] = (Vector){0};
    for (int64_t row = 0; row < n_rows; row++) {
#pragma GCC unroll 24
        for (int column = 0; column < n_columns; column++) {
            Pairs same = (Pairs){0} + columns[row * stride + column];
            sums[column] = add_products(sums[column], rows[row], same);
        }
    }
}

/* Compute scores, which are base-2 logarithms. Returns the largest one of each query. */
INLINE_BF16 Vector compute_scores(const Room *room, int64_t half) {
    Vector most = (Vector){0} - FLT_MAX;
    for (int64_t key = 0; key < room->n_keys; key += LANES) {
        const int32_t *keys = (const int32_t *)(room->keys + key / LANES * half);
        Vector scores[LANES];
        multiply(room->queries, keys, LANES, half, scores, LANES);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            most = (Vector)_mm512_max_ps((__m512)scores[i], (__m512)most);
            room->scores[key + i] = scores[i];
        }
    }
    return most;
}

/* Replace scores by weights, relative to the largest, and return the sums of the rounded weights.
 * A sum is NaN if a score is NaN or infinite, and so is the result of the query. */
INLINE_BF16 Vector weigh(const Room *room, int64_t n_keys, Vector most) {
    Pairs ones = (Pairs){0} + 0x3f803f80;
    Pairs *weights = (Pairs *)room->scores;
    Vector sums = {0};
    for (int64_t key = 0; key < n_keys; key += 2) {
        Vector low = power_of_2(room->scores[key] - most);
        Vector high = {0};
        if (key + 1 < n_keys)
            high = power_of_2(room->scores[key + 1] - most);
        Pairs pairs = pairs_of(low, high);
        sums = add_products(sums, pairs, ones);
        weights[key / 2] = pairs;
    }
    return sums;
}

/* Sum some columns of values by their weights. */
INLINE_BF16 void sum_columns(const Room *room, int64_t first, int64_t n_pairs,
                             const int n_columns) {
    const Pairs *weights = (const Pairs *)room->scores;
    Vector sums[24];
    multiply(weights, room->values + first, room->width, n_pairs, sums, n_columns);
#pragma GCC unroll 24
    for (int column = 0; column < n_columns; column++)
        room->out[first + column] = sums[column];
}

/* Sum all values by their weights, in as many columns at once as there are registers for. */
INLINE_BF16 void sum_values(const Room *room, int64_t n_pairs) {
    int64_t column = 0;
    for (; room->width - column > 24; column += 16)
        sum_columns(room, column, n_pairs, 16);
    if (room->width - column == 24)
        sum_columns(room, column, n_pairs, 24);
    else if (room->width - column == 16)
        sum_columns(room, column, n_pairs, 16);
    else
        sum_columns(room, column, n_pairs, 8);
}

/* Scale and store the results of LANES queries, or of those that are left. */
INLINE_BF16 void store(const Head *head, const Room *room, int64_t first, Vector scale) {
    int64_t half = head->dim / 2;
    for (int64_t start = 0; start < half; start += LANES) {
        const Vector *out = room->out + 2 * start;
        Pairs pairs[LANES] = {{0}};
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (start + i < half)
                pairs[i] = pairs_of(out[2 * i] * scale, out[2 * i + 1] * scale);
        transpose(pairs);
        for (int i = 0; i < LANES && first + i < head->n_tokens; i++) {
            uint16_t *row = head->out + (first + i) * head->out_stride + 2 * start;
            _mm512_mask_storeu_epi32(row, first_lanes(half - start), (__m512i)pairs[i]);
        }
    }
}

BF16 static void attend_head(const Head *head, const Room *room) {
    int64_t half = head->dim / 2, n_keys = head->n_tokens;
    float scale = 1.44269504F / __builtin_sqrtf((float)head->dim);
    for (int64_t key = 0; key < n_keys; key += LANES)
        load_turned(head, head->keys, key, 1, room->keys + key / LANES * half);
    load_values(head, room);
    for (int64_t query = 0; query < n_keys; query += LANES) {
        load_turned(head, head->queries, query, scale, room->queries);
        Vector most = compute_scores(room, half);
        Vector sums = weigh(room, n_keys, most);
        sum_values(room, (n_keys + 1) / 2);
        store(head, room, query, 1 / sums);
    }
}

/* Allocate a room in which vectors start at multiples of their size. Returns what to free, or NULL
 * if memory runs out. */
static void *open_room(Room *room, int64_t n_tokens, int64_t dim) {
    int64_t half = dim / 2;
    room->n_keys = round_up(n_tokens, LANES);
    room->width = round_up(dim, 8);
    int64_t n_blocks = room->n_keys / LANES;
    int64_t n_vectors = half + room->n_keys + room->width;
    n_vectors += n_blocks * (half + room->width / 2);
    char *memory = calloc((size_t)n_vectors + 1, sizeof(Vector));
    if (!memory)
        return NULL;
    room->keys = (Pairs *)(memory + sizeof(Vector) - (uintptr_t)memory % sizeof(Vector));
    room->queries = room->keys + n_blocks * half;
    room->scores = (Vector *)(room->queries + half);
    room->out = room->scores + room->n_keys;
    room->values = (int32_t *)(room->out + room->width);
    return memory;
}

int multiplies_bf16(void) {
    unsigned a = 0, b, c, d;
    return supports_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}

int attend_bf16(const uint16_t *projected, const float *cos, const float *sin,
                const int64_t *runs, int64_t n_runs, int64_t n_heads, int64_t dim,
                uint16_t *out) {
    int64_t stride = n_heads * dim;
    for (const int64_t *run = runs; run < runs + 3 * n_runs; run += 3) {
        int64_t first = run[0], n_tokens = run[2];
        Room room;
        void *memory = open_room(&room, n_tokens, dim);
        if (!memory)
            return -1;
        for (int64_t i = 0; i < run[1] * n_heads; i++) {
            int64_t token = first + i / n_heads * n_tokens, column = i % n_heads * dim;
            const uint16_t *queries = projected + token * 3 * stride + column;
            Head head = {queries, queries + stride, queries + 2 * stride,
                         out + token * stride + column, cos + first * dim, sin + first * dim / 2,
                         n_tokens, dim, 3 * stride, stride};
            attend_head(&head, &room);
        }
        free(memory);
    }
    return 0;
}

#else

int multiplies_bf16(void) { return 0; }

int attend_bf16(void) { return -1; } /* never called */

#endif
