/* Words of nine residues, and the table of their owners. */

#ifndef VIRNUCPRO_KMERS_H
#define VIRNUCPRO_KMERS_H

#include "common.h"

enum {
    N_OWNERS = 7,  /* none, and the six of word tables */
    NOT_YET = 255, /* instead of an owner: not looked up yet */
    WORD = 9,      /* residues */
    ONE_VIRAL = 2,
    ONE_CELLULAR = 4,
    RARITY = 8,
    BUCKET_BITS = 20,
    HINT_BITS = 2 /* of the rest, after the bits of the bucket */
};

typedef struct {
    const uint8_t *hints; /* a bit per prefix of hashes: does a word outside the sample have it */
    const uint8_t *n_of_bucket;
    const int32_t *first; /* first entry of each group of buckets */
    const uint16_t *entries;
    int64_t n_entries;
} Words;

static inline uint64_t hash_of(int64_t number) {
    const uint64_t multiplier = UINT64_C(0x9E3779B97F4A7C15); /* 2^64 over the golden ratio */
    uint64_t hash = (uint64_t)number * multiplier;
    hash ^= hash >> 32;
    hash *= multiplier;
    return hash ^ hash >> 32;
}

/* Index of the bit that is set if a word outside the sample has the same prefix. */
static inline uint64_t hint_of(uint64_t hash) { return hash >> (64 - BUCKET_BITS - HINT_BITS); }

/* The hash of a word; its hint is prefetched for the search that follows. */
static inline uint64_t hash_to_find(const Words *words, int64_t number) {
    uint64_t hash = hash_of(number);
    __builtin_prefetch(words->hints + (hint_of(hash) >> 3));
    return hash;
}

#pragma GCC visibility push(hidden)

/* The owner of each hash, which `hash_to_find` made. */
void vnp_owners_of_hashes(const Words *words, const uint64_t *hashes, int64_t n, uint8_t *owners);

#pragma GCC visibility pop

#endif
