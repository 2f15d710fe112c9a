/* Hash ids. */

#include <stdint.h>

/* Number `index` of the SplitMix64 generator with seed 0 (doi:10.1145/2660193.2660195). */
static uint64_t weight(uint64_t index) {
    uint64_t word = (index + 1) * UINT64_C(0x9E3779B97F4A7C15);
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

/* The digest of each text that ends with a zero in n bytes: a sum of its bytes and its end, weighted
 * by position. */
int id_digests(const uint8_t *texts, int64_t n, uint64_t *digests) {
    uint64_t sum = 0, place = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (uint64_t)(texts[i] + 1) * weight(place++);
        if (texts[i] == 0) {
            *digests++ = sum;
            sum = place = 0;
        }
    }
    return 0;
}
