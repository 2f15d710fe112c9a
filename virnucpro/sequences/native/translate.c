/* Translate the six frames of chunks, and keep those without a stop. */

#include <stdint.h>

enum { N_FRAMES = 6, N_PHASES = 3, CODON = 3 };

/* Tables of one genetic code. A codon whose bases have the digits a, b, c has the number
 * 25 a + 5 b + c. A codon with a letter other than ACGTU has the residue 0. */
typedef struct {
    const uint8_t *digits;      /* 256, by letter */
    const uint8_t *letters[2];  /* 256 each, by letter: upper case with T for U, its complement */
    const uint8_t *residues[2]; /* 256 each, by the codon's number on the forward strand */
} Code;

/* Write the residues of the codons, in order. Return their number, or -1 if one is a stop. */
static int64_t translate(const Code *code, const uint8_t *first, int64_t step, int64_t n_codons,
                         const uint8_t *residues, uint8_t *protein) {
    int64_t n = 0;
    for (; n_codons > 0; n_codons--, first += step) {
        const uint8_t *digits = code->digits;
        uint8_t residue = residues[25 * digits[first[0]] + 5 * digits[first[1]] + digits[first[2]]];
        if (residue == '*')
            return -1;
        protein[n] = residue;
        n += residue != 0;
    }
    return n;
}

/* Write n letters of a strand, from the base at `first` on. */
static void copy_bases(const Code *code, const uint8_t *first, int strand, int64_t n,
                       uint8_t *bases) {
    const uint8_t *letters = code->letters[strand];
    int64_t step = strand ? -1 : 1;
    for (int64_t i = 0; i < n; i++, first += step)
        bases[i] = letters[*first];
}

/* The chunks follow each other in `text`. `tables` has the five tables of `Code`.
 *
 * `columns` has room for 6 n_chunks values in each of six columns: the chunk of each open frame, its
 * frame, its start and end in the chunk, and the ends of its protein and its bases in `proteins`
 * and `bases`. The bases are those of the residues and one more, if the chunk has it. */
int translate_frames(const uint8_t *text, const int64_t *lengths, int64_t n_chunks,
                     const uint8_t *tables, int64_t *columns, uint8_t *proteins, uint8_t *bases,
                     int64_t *n_frames) {
    const Code code = {tables, {tables + 256, tables + 512}, {tables + 768, tables + 1024}};
    int64_t capacity = N_FRAMES * n_chunks, n = 0, protein_end = 0, bases_end = 0;
    for (int64_t chunk = 0; chunk < n_chunks; text += lengths[chunk++])
        for (int frame = 0; frame < N_FRAMES; frame++) {
            int strand = frame / N_PHASES, phase = frame % N_PHASES;
            int64_t n_left = lengths[chunk] - phase; /* bases of the frame */
            if (n_left < CODON)
                continue;
            int64_t n_whole = n_left - n_left % CODON; /* those in codons */
            int64_t first = strand ? n_left - CODON : phase;
            int64_t n_residues = translate(&code, text + first, strand ? -CODON : CODON,
                                           n_whole / CODON, code.residues[strand],
                                           proteins + protein_end);
            if (n_residues <= 0)
                continue;
            int64_t n_bases = 1 + CODON * n_residues;
            n_bases = n_bases < n_left ? n_bases : n_left;
            copy_bases(&code, text + (strand ? n_left - 1 : phase), strand, n_bases,
                       bases + bases_end);
            protein_end += n_residues;
            bases_end += n_bases;
            int64_t start = strand ? n_left - n_whole : phase;
            int64_t row[] = {chunk, frame, start, start + n_whole, protein_end, bases_end};
            for (int column = 0; column < 6; column++)
                columns[column * capacity + n] = row[column];
            n++;
        }
    *n_frames = n;
    return 0;
}
