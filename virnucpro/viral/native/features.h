/* The features of pieces. */

#ifndef VIRNUCPRO_FEATURES_H
#define VIRNUCPRO_FEATURES_H

#include "kmers.h"
#include "orfs.h"

enum {
    N_JUNCTIONS = 256,
    N_PAIRS = N_RESIDUES * N_RESIDUES,
    N_PALINDROMES = 19,
    N_FIGURES = 36,
    N_FEATURES = 4 * N_CODONS + 2 * N_JUNCTIONS + N_PAIRS + N_PALINDROMES + N_FIGURES +
                 N_KMER_CLASSES - 1
};

static const double STEPS = 16777216; /* per unit, in sums of features */

/* Tables that all pieces of a call share. */
typedef struct {
    uint8_t codes[2][N_CODES];    /* by strand, and by the code of the forward strand */
    uint8_t numbers[2][N_CODES];  /* of known codons; N_CODONS: unknown */
    uint8_t residues[2][N_CODES];
    uint8_t code_of_number[N_CODONS];
    uint8_t n_gc[N_CODONS];
    uint8_t stops[N_CODONS][3];
    int n_stops;
} Tables;

/* Counts of one piece. Between pieces, the counts of junctions and pairs are 0. */
typedef struct {
    int32_t long_codes[N_CODES], longest_codes[N_CODES];
    int32_t junctions[2][N_JUNCTIONS], n_junctions, most_junctions;
    int32_t pairs[N_PAIRS], n_pairs, most_pairs;
    int32_t bases[4], twos, fours[16], sixes;
    int32_t classes[N_KMER_CLASSES];
    int64_t n_kmers;
    uint8_t *known;       /* classes of k-mers, (n_digits, 2); the caller keeps them */
    int64_t n_unknown;    /* k-mers to look up */
    uint64_t *hashes;     /* of the k-mers to look up */
    uint8_t **at;         /* where to store their classes */
    uint8_t *found;       /* their classes; also used to mark palindromes */
    uint16_t *threes;     /* numbers of three residues */
    uint16_t *met[3];     /* junctions of both kinds, and pairs, in the order of the piece */
} Tally;

/* What it takes to read pieces. */
typedef struct {
    Bases bases;
    Tables tables;
    KmerTable kmers;
    Room room;
    Tally tally;
    float *roots;
} Reader;

/* The nearest whole number, half to even, for values below 2^51. */
static inline double nearest(double value) {
    const double shift = 6755399441055744; /* 1.5 * 2^52: numbers near it are whole */
    return (value + shift) - shift;
}

#pragma GCC visibility push(hidden)

int vnp_open_reader(Reader *reader, const Bases *bases, const int64_t *lengths, int64_t n,
                    const uint8_t *code_tables, const KmerTable *kmers, uint8_t *classes);
void vnp_close_reader(Reader *reader);

/* Compute the features of a piece. Returns 1 if it has no known base. */
uint8_t vnp_read_piece(Reader *reader, int64_t from, int32_t length, float *out);

#pragma GCC visibility pop

#endif
