/* K-mers of nine residues, and the table of their classes. */

#ifndef VIRNUCPRO_KMERS_H
#define VIRNUCPRO_KMERS_H

#include "common.h"

enum {
    N_KMER_CLASSES = 7,  /* none, and the six of k-mer tables */
    NOT_YET = 255, /* instead of a class: not looked up yet */
    KMER = 9,      /* residues */
    ONE_VIRAL = 2,
    ONE_CELLULAR = 4,
    RARITY = 8,
    BUCKET_BITS = 20,
    HINT_BITS = 2 /* of the rest, after the bits of the bucket */
};

typedef struct {
    const uint8_t *hints; /* a bit per prefix of hashes: does a k-mer outside the sample have it */
    const uint8_t *n_of_bucket;
    const int32_t *first; /* first entry of each group of buckets */
    const uint16_t *entries;
    int64_t n_entries;
} KmerTable;

static inline uint64_t hash_of(int64_t number) {
    const uint64_t multiplier = UINT64_C(0x9E3779B97F4A7C15); /* 2^64 over the golden ratio */
    uint64_t hash = (uint64_t)number * multiplier;
    hash ^= hash >> 32;
    hash *= multiplier;
    return hash ^ hash >> 32;
}

/* Index of the bit that is set if a k-mer outside the sample has the same prefix. */
static inline uint64_t hint_of(uint64_t hash) { return hash >> (64 - BUCKET_BITS - HINT_BITS); }

/* The hash of a k-mer; its hint is prefetched for the search that follows. */
static inline uint64_t hash_to_find(const KmerTable *kmers, int64_t number) {
    uint64_t hash = hash_of(number);
    __builtin_prefetch(kmers->hints + (hint_of(hash) >> 3));
    return hash;
}

#pragma GCC visibility push(hidden)

/* The class of each hash, which `hash_to_find` made. */
void vnp_classes_of_hashes(const KmerTable *kmers, const uint64_t *hashes, int64_t n,
                           uint8_t *classes);

#pragma GCC visibility pop

#endif
