/* Vectors of sixteen numbers, which the C files of the models share. */

#ifndef VIRNUCPRO_MODELS_VECTORS_H
#define VIRNUCPRO_MODELS_VECTORS_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && !defined(PORTABLE)
#include <cpuid.h>
#endif

/* Fuse a * b + c where the processor can. Bits differ between processors in any case, because of
 * the products around attention. */
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

enum { LANES = 16 }; /* numbers in a vector */

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES))); /* bf16 */

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && !defined(PORTABLE)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))

/* Return whether the processor and the operating system support AVX512. In libraries that Zig
 * compiled, as in the wheels, `__builtin_cpu_supports` always returns 0. */
static inline int supports_avx512(void) {
    const unsigned saved = 0xe6; /* by the system: registers of SSE, AVX and AVX-512 */
    const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (b & needed) == needed;
}
#endif

INLINE int64_t n_lanes(int64_t n_left) { return n_left < LANES ? n_left : LANES; }

/* Copy n numbers of a size, at most LANES. Nearly always it is LANES, without a call. */
INLINE void copy(void *restrict to, const void *restrict from, int64_t n, const size_t size) {
    if (n == LANES)
        memcpy(to, from, LANES * size);
    else
        memcpy(to, from, (size_t)n * size);
}

INLINE Vector widened(Halves halves) {
    return (Vector)(__builtin_convertvector(halves, Whole) << 16);
}

/* Round half to even. */
INLINE Halves halves_of(Vector numbers) {
    Whole bits = (Whole)numbers, is_nan = numbers != numbers;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    bits = (bits & ~is_nan) | (is_nan & 0x7fc0);
    return __builtin_convertvector(bits, Halves);
}

/* a where a condition is true in a lane (all bits set), else b. */
INLINE Vector chosen(Whole condition, Vector a, Vector b) {
    return (Vector)(((Whole)a & condition) | ((Whole)b & ~condition));
}

/* 2^x for x <= 0. The whole part of x goes into the exponent; the rest, at most 1/2 in size, into
 * the series of exp, with an error of at most 1e-8. */
INLINE Vector exp2_of(Vector x) {
    static const float ROUNDING = 12582912; /* 1.5 * 2^23: added to a number, it rounds it */
    Vector rounded = x + ROUNDING, rest = x - (rounded - ROUNDING);
    Vector power = 1.5403530e-4F * rest + 1.3333558e-3F;
    power = power * rest + 9.6181291e-3F;
    power = power * rest + 5.5504109e-2F;
    power = power * rest + 2.4022651e-1F;
    power = power * rest + 6.9314718e-1F;
    power = power * rest + 1.0F;
    return (Vector)((Whole)power + ((Whole)rounded << 23));
}

INLINE Vector larger(Vector a, Vector b) {
    return chosen(a > b, a, b);
}

/* The numbers of the lanes, with one bit of each flipped. */
#define FLIPPED(bit)                                                                             \
    0 ^ bit, 1 ^ bit, 2 ^ bit, 3 ^ bit, 4 ^ bit, 5 ^ bit, 6 ^ bit, 7 ^ bit, 8 ^ bit, 9 ^ bit,    \
        10 ^ bit, 11 ^ bit, 12 ^ bit, 13 ^ bit, 14 ^ bit, 15 ^ bit
#ifdef __clang__
#define FLIP(vector, bit) __builtin_shufflevector(vector, vector, FLIPPED(bit))
#else
#define FLIP(vector, bit) __builtin_shuffle(vector, (Whole){FLIPPED(bit)})
#endif

/* The largest number, in all lanes. */
INLINE Vector largest_of(Vector numbers) {
    numbers = larger(numbers, FLIP(numbers, 8));
    numbers = larger(numbers, FLIP(numbers, 4));
    numbers = larger(numbers, FLIP(numbers, 2));
    return larger(numbers, FLIP(numbers, 1));
}

INLINE float sum_of(Vector numbers) {
    numbers += FLIP(numbers, 8);
    numbers += FLIP(numbers, 4);
    numbers += FLIP(numbers, 2);
    numbers += FLIP(numbers, 1);
    return numbers[0];
}

#endif
