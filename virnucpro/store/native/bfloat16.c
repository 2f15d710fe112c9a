/* Round the numbers of vectors to bfloat16. */

#include <stdint.h>
#include <string.h>

/* The upper halves of n finite numbers, rounded to nearest, ties to even. */
int to_bfloat16(const float *numbers, int64_t n, uint16_t *halves) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        uint32_t is_odd = bits >> 16 & 1;
        halves[i] = (uint16_t)((bits + 0x7FFF + is_odd) >> 16);
    }
    return 0;
}
