/* What the files of the scorer share: digits of bases, codes of codons, and small helpers.
 *
 * core/native.py calls the functions of the library and documents their arrays. No function keeps
 * state between calls or touches Python, so calls may run in parallel. Only tables and kernels
 * stay, which are made when the library is loaded. Each function that Python calls returns 0, or -1
 * if memory runs out.
 *
 * The digits of A, C, G and T are 0 to 3; any other letter is 4. The code of a codon is
 * 25 a + 5 b + c. Do not compile with -ffast-math: scores must be the same on every machine.
 *
 * Functions named open_* expect a zeroed struct. If memory runs out, the caller still closes it.
 * Functions that files share begin with vnp_, and the library does not export them.
 */

#ifndef VIRNUCPRO_COMMON_H
#define VIRNUCPRO_COMMON_H

#include <stdint.h>
#include <string.h>

enum {
    UNKNOWN = 4,
    N_CODES = 125,
    N_CODONS = 64,
    N_RESIDUES = 20
};

static inline uint8_t opposite(uint8_t digit) { return digit < UNKNOWN ? 3 - digit : UNKNOWN; }

static inline int64_t at_least(int64_t least, int64_t value) {
    return value < least ? least : value;
}

/* A call of memset: it is faster than the code that compilers inline for a short one. */
__attribute__((noinline, unused)) static void clear(void *values, size_t n_bytes) {
    memset(values, 0, n_bytes);
}

static inline double larger(double a, double b) { return a > b ? a : b; }

/* The code of a codon on the opposite strand. */
static inline uint8_t other_of(int code) {
    return 25 * opposite(code % 5) + 5 * opposite(code / 5 % 5) + opposite(code / 25);
}

static inline int64_t longest_of(const int64_t *lengths, int64_t n) {
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++)
        longest = at_least(longest, lengths[i]);
    return longest;
}

#endif
