/* Bases and the open reading frames of pieces. */

#ifndef VIRNUCPRO_ORFS_H
#define VIRNUCPRO_ORFS_H

#include "common.h"

enum {
    N_LAYOUT = 12,
    N_TETRA = 136, /* tetranucleotides, each with its reverse complement */
    GENE_LIKE = 30 /* codons */
};

typedef struct {
    int32_t strand, start, n_codons; /* start: bases, on its strand */
    int32_t first;                   /* base on the forward strand */
} Stretch;

/* A row of bases, and what is looked up once for all of its pieces. */
typedef struct {
    const uint8_t *digits;
    int64_t n;
    const uint8_t *codes;    /* code of the codon that starts at each base */
    const uint8_t *tetra;    /* number of the tetranucleotide that starts at each base */
    const int32_t *stops[2]; /* positions of the stop codons on each strand, ascending */
    int64_t n_stops[2];
} Bases;

/* Working memory for one piece. */
typedef struct {
    Stretch *rows[6], *sorted, *kept; /* by frame; all, longest first; the kept ones */
    int32_t n_rows[6], n_stops[6], longest[6];
    int64_t n_found, n_kept, n_covered;
    int64_t first_stop[2], end_stop[2]; /* stops of the latest piece by strand, half-open */
    int32_t *n_of_length;
    uint64_t *covered;
} Room;

static inline Bases bases_of(const uint8_t *digits, int64_t n, const uint8_t *codes,
                             const uint8_t *tetra, const int32_t *stops,
                             const int64_t *n_stops) {
    Bases bases = {digits, n, codes, tetra, {stops, stops + n}, {n_stops[0], n_stops[1]}};
    return bases;
}

#pragma GCC visibility push(hidden)

int vnp_open_room(Room *room, int64_t longest);
void vnp_close_room(Room *room);

/* Find the open stretches of a piece, and keep those that longer ones hardly cover. */
void vnp_find_stretches(const Bases *bases, int64_t from, int32_t length, int32_t shortest,
                        Room *room);

/* Sort stretches by their first base; ties keep their order, the longest first. */
void vnp_sort_by_place(Stretch *stretches, int64_t n);

/* How much a codon suggests the frame of a gene, by its number. */
int vnp_coding_weight(int number);

#pragma GCC visibility pop

#endif
