/* Add a branch to the residual stream, and norm the sums, on one thread.
 *
 * transformer.py calls it and documents the arrays. Each row is computed alone, so its bits do not
 * depend on the rest of the batch.
 */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef struct {
    const float *x;         /* the stream, (n_rows, dim) */
    const uint16_t *branch; /* bf16, (n_rows, dim); no branch: NULL */
    float branch_scale;
    const float *weight, *bias; /* (dim,); no bias: NULL */
    float epsilon;              /* added to variances */
    int64_t n_rows, dim;
    float *sums; /* x and the scaled branch, (n_rows, dim); written only with a branch */
    void *out;   /* (n_rows, dim) */
    int is_bf16; /* the type of out; otherwise it is float32 */
} Stream;

/* Add the branch of a row, and keep the sums in the room. Returns their mean. */
INLINE float add_branch(const Stream *stream, int64_t first, Vector *restrict room,
                        const int is_whole) {
    Vector totals = {0};
    for (int64_t i = 0; i < stream->dim; i += LANES) {
        int64_t n = is_whole ? LANES : n_lanes(stream->dim - i);
        Vector numbers = {0};
        copy(&numbers, stream->x + first + i, n, sizeof(float));
        if (stream->branch) {
            Halves halves = {0};
            copy(&halves, stream->branch + first + i, n, sizeof(uint16_t));
            numbers += widened(halves) * stream->branch_scale;
            copy(stream->sums + first + i, &numbers, n, sizeof(float));
        }
        totals += numbers;
        room[i / LANES] = numbers;
    }
    return sum_of(totals) / (float)stream->dim;
}

/* Subtract the mean of a row in the room. Returns what to multiply with for a variance of 1. */
INLINE float centre(const Stream *stream, float mean, Vector *restrict room,
                    const int is_whole) {
    Vector squares = {0};
    for (int64_t i = 0; i < stream->dim; i += LANES) {
        int64_t n = is_whole ? LANES : n_lanes(stream->dim - i);
        Vector numbers = (Vector){0} + mean; /* also in lanes after the row */
        copy(&numbers, room + i / LANES, n, sizeof(float));
        numbers -= mean;
        squares += numbers * numbers;
        room[i / LANES] = numbers;
    }
    float variance = sum_of(squares) / (float)stream->dim;
    return 1 / __builtin_sqrtf(variance + stream->epsilon);
}

/* Scale a centred row, and write it. */
INLINE void write_row(const Stream *stream, int64_t first, float scale,
                      const Vector *restrict room, const int is_whole) {
    for (int64_t i = 0; i < stream->dim; i += LANES) {
        int64_t n = is_whole ? LANES : n_lanes(stream->dim - i);
        Vector numbers = room[i / LANES], weight = {0}, bias = {0};
        copy(&weight, stream->weight + i, n, sizeof(float));
        if (stream->bias)
            copy(&bias, stream->bias + i, n, sizeof(float));
        numbers = numbers * scale * weight + bias;
        Halves halves = halves_of(numbers);
        if (stream->is_bf16)
            copy((uint16_t *)stream->out + first + i, &halves, n, sizeof(uint16_t));
        else
            copy((float *)stream->out + first + i, &numbers, n, sizeof(float));
    }
}

INLINE void norm_rows(const Stream *stream, const int is_whole) {
    Vector room[stream->dim / LANES + 1];
    for (int64_t first = 0; first < stream->n_rows * stream->dim; first += stream->dim) {
        float mean = add_branch(stream, first, room, is_whole);
        float scale = centre(stream, mean, room, is_whole);
        write_row(stream, first, scale, room, is_whole);
    }
}

/* Rows of whole vectors, as in all published models, need no care for their ends. */
INLINE void norm_all(const Stream *stream) {
    if (stream->dim % LANES)
        norm_rows(stream, 0);
    else
        norm_rows(stream, 1);
}

typedef void Norm(const Stream *stream);

static void norm_plain(const Stream *stream) { norm_all(stream); }

static Norm *norm_here = norm_plain;

#if defined(__x86_64__) && !defined(PORTABLE)
AVX512 static void norm_avx512(const Stream *stream) { norm_all(stream); }

__attribute__((constructor)) static void choose_norm(void) {
    if (supports_avx512())
        norm_here = norm_avx512;
}
#endif

int add_and_norm(const void *x, const void *branch, double branch_scale, const void *weight,
                 const void *bias, double epsilon, int64_t n_rows, int64_t dim, void *sums,
                 void *out, int is_bf16) {
    Stream stream = {x, branch, (float)branch_scale, weight, bias, (float)epsilon,
                     n_rows, dim, sums, out, is_bf16};
    norm_here(&stream);
    return 0;
}
