/* Round rows to int8 for matrix products, and restore the products, on one thread.
 *
 * eight_bits.py calls it and documents the arrays. Each row is computed alone, so its bits do not
 * depend on the rest of the batch. A row with NaN or an infinite number has the scale NaN.
 */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef int8_t Bytes __attribute__((vector_size(LANES)));

/* Rows to round: (n_rows, dim). */
typedef struct {
    const void *numbers;
    int64_t n_rows, dim;
    int is_bf16, has_gelu;
    int8_t *values; /* (n_rows, dim) */
    float *scales;  /* (n_rows,) */
} Rows;

/* A product of two int8 matrices: (n_rows, n_out). */
typedef struct {
    const int32_t *product;
    const float *row_scales, *column_scales, *bias; /* no bias: NULL */
    int64_t n_rows, n_out;
    uint16_t *out; /* bf16 */
} Product;

/* Load up to LANES numbers as float32, the others as 0. */
INLINE Vector load(const Rows *rows, int64_t first, int64_t n) {
    Vector numbers = {0};
    if (!rows->is_bf16) {
        copy(&numbers, (const float *)rows->numbers + first, n, 4);
        return numbers;
    }
    Halves halves = {0};
    copy(&halves, (const uint16_t *)rows->numbers + first, n, 2);
    return widened(halves);
}

/* The exact GELU. erf has an error of at most 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). */
INLINE Vector gelu(Vector x) {
    Vector size = larger(x, -x) * 0.70710678F, least = (Vector){0} - 126;
    Vector t = 1 / (1 + 0.3275911F * size);
    Vector series = 1.061405429F * t - 1.453152027F;
    series = series * t + 1.421413741F;
    series = series * t - 0.284496736F;
    series = series * t + 0.254829592F;
    Vector exponential = exp2_of(larger(-1.44269504F * size * size, least));
    Vector tail = 0.5F * series * t * exponential; /* (1 - erf(size)) / 2 */
    return x * chosen(x < 0, tail, 1 - tail);
}

/* Round a row. The largest number becomes 127. */
INLINE void round_row(const Rows *rows, int64_t row, Vector *restrict room,
                      const int is_whole) {
    static const float ROUNDING = 12582912; /* 1.5 * 2^23: added to a number, it rounds it */
    int64_t first = row * rows->dim;
    Vector most = {0}, faults = {0}, one;
    for (int64_t i = 0; i < rows->dim; i += LANES) {
        one = load(rows, first + i, is_whole ? LANES : n_lanes(rows->dim - i));
        one = rows->has_gelu ? gelu(one) : one;
        most = larger(larger(one, -one), most);
        faults += one - one; /* 0, or NaN */
        room[i / LANES] = one;
    }
    float least = 1e-12F, largest = largest_of(most)[0];
    largest = largest > least ? largest : least; /* a row of zeros */
    rows->scales[row] = largest / 127 + sum_of(faults);
    float scale = 127 / largest;
    for (int64_t i = 0; i < rows->dim; i += LANES) {
        one = room[i / LANES];
        Vector rounding = (Vector){0} + ROUNDING;
        Whole numbers = (Whole)(one * scale + rounding) - (Whole)rounding;
        Bytes bytes = __builtin_convertvector(numbers, Bytes);
        copy(rows->values + first + i, &bytes, is_whole ? LANES : n_lanes(rows->dim - i), 1);
    }
}

INLINE void round_rows(const Rows *rows, const int is_whole) {
    Vector room[rows->dim / LANES + 1];
    for (int64_t row = 0; row < rows->n_rows; row++)
        round_row(rows, row, room, is_whole);
}

/* Rows of whole vectors, as in all published models, need no care for their ends. */
INLINE void round_all(const Rows *rows) {
    if (rows->dim % LANES)
        round_rows(rows, 0);
    else
        round_rows(rows, 1);
}

/* Scale products back, and add the bias. */
INLINE void restore_rows(const Product *p, const int is_whole) {
    for (int64_t row = 0; row < p->n_rows; row++) {
        for (int64_t i = 0; i < p->n_out; i += LANES) {
            int64_t n = is_whole ? LANES : n_lanes(p->n_out - i);
            Whole whole = {0};
            Vector scale = {0}, bias = {0};
            copy(&whole, p->product + row * p->n_out + i, n, 4);
            copy(&scale, p->column_scales + i, n, 4);
            if (p->bias)
                copy(&bias, p->bias + i, n, 4);
            Vector number = __builtin_convertvector(whole, Vector) * (scale * p->row_scales[row]);
            number += bias;
            Halves halves = halves_of(number);
            copy(p->out + row * p->n_out + i, &halves, n, 2);
        }
    }
}

INLINE void restore_all(const Product *product) {
    if (product->n_out % LANES)
        restore_rows(product, 0);
    else
        restore_rows(product, 1);
}

static void round_plain(const Rows *rows) { round_all(rows); }
static void restore_plain(const Product *product) { restore_all(product); }

typedef void Round(const Rows *rows);
typedef void Restore(const Product *product);

static Round *round_here = round_plain;
static Restore *restore_here = restore_plain;

#if defined(__x86_64__) && !defined(PORTABLE)
AVX512 static void round_avx512(const Rows *rows) { round_all(rows); }
AVX512 static void restore_avx512(const Product *product) { restore_all(product); }

__attribute__((constructor)) static void choose_code(void) {
    if (supports_avx512()) {
        round_here = round_avx512;
        restore_here = restore_avx512;
    }
}
#endif

int round_to_int8(const void *numbers, int is_bf16, int has_gelu, int64_t n_rows, int64_t dim,
                  void *values, void *scales) {
    Rows rows = {numbers, n_rows, dim, is_bf16, has_gelu, values, scales};
    round_here(&rows);
    return 0;
}

int restore_int8(const void *product, const void *row_scales, const void *column_scales,
                 const void *bias, int64_t n_rows, int64_t n_out, void *out) {
    Product whole = {product, row_scales, column_scales, bias, n_rows, n_out, out};
    restore_here(&whole);
    return 0;
}
