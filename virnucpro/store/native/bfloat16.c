/* Round the numbers of vectors to bfloat16. */

#include <stdint.h>
#include <string.h>

static void round_numbers(const float *numbers, int64_t n, uint16_t *halves) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        uint32_t is_odd = bits >> 16 & 1;
        halves[i] = (uint16_t)((bits + 0x7FFF + is_odd) >> 16);
    }
}

/* The upper halves of n finite numbers, rounded to nearest, ties to even.

   Memory is slower than the rounding. Prefetching doubles the speed. Past the end it does nothing. */
int to_bfloat16(const float *numbers, int64_t n, uint16_t *halves) {
    enum { LINE = 16, AT_ONCE = 4 * LINE, AHEAD = 512 }; /* numbers */
    int64_t first = 0;
    for (; n - first >= AT_ONCE; first += AT_ONCE) {
        for (int64_t i = 0; i < AT_ONCE; i += LINE)
            __builtin_prefetch(numbers + first + AHEAD + i);
        round_numbers(numbers + first, AT_ONCE, halves + first);
    }
    round_numbers(numbers + first, n - first, halves + first);
    return 0;
}
