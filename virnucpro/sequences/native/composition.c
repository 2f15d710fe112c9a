/* Count the words of frames. */

#include <stdint.h>

enum { N_CODONS = 64, N_FOURS = 256, N_BORDERS = 16, N_WORDS = N_CODONS + N_FOURS + N_BORDERS };

static void write_shares(const int32_t *counts, int n, float *shares) {
    int64_t total = 0;
    for (int i = 0; i < n; i++)
        total += counts[i];
    for (int i = 0; i < n; i++)
        shares[i] = (float)((double)counts[i] / (double)(total ? total : 1));
}

/* The frames follow each other in `text`. `digits` has the digit of each letter, above 3 for letters
 * that no word may have. Each frame has the shares of its codons, of four bases at any place, and
 * of the pairs of bases where two codons meet. */
int frame_composition(const uint8_t *text, const int64_t *lengths, int64_t n,
                      const uint8_t *digits, float *shares) {
    for (int64_t frame = 0; frame < n; text += lengths[frame++], shares += N_WORDS) {
        int32_t counts[N_WORDS] = {0};
        int32_t *fours = counts + N_CODONS, *borders = fours + N_FOURS;
        uint32_t word = 0; /* the last bases, two bits each */
        int n_known = 0, phase = 0;
        for (int64_t i = 0; i < lengths[frame]; i++, phase = phase == 2 ? 0 : phase + 1) {
            uint8_t digit = digits[text[i]];
            n_known = digit < 4 ? n_known + 1 : 0;
            word = (word << 2 | (digit & 3)) % N_FOURS;
            if (n_known >= 4)
                fours[word]++;
            if (n_known >= 3 && phase == 2)
                counts[word % N_CODONS]++;
            if (n_known >= 2 && phase == 0)
                borders[word % N_BORDERS]++;
        }
        write_shares(counts, N_CODONS, shares);
        write_shares(fours, N_FOURS, shares + N_CODONS);
        write_shares(borders, N_BORDERS, shares + N_CODONS + N_FOURS);
    }
    return 0;
}
