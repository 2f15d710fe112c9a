/* Sample nine-residue k-mers, and look them up in the index of known viruses.
 *
 * A k-mer is nine residues without a stop or an unknown base. Both strands are translated in all
 * frames by the standard code, so a record and its reverse complement have the same k-mers. A
 * residue has five bits, and a k-mer 45. Its hash is a bijection of 64 bits, so equal hashes are
 * equal k-mers. The sample is all k-mers whose hash is at most a limit, so every sequence samples
 * the same ones.
 *
 * The index is a hash table. The lowest bits of a hash choose a bucket, and the next ones are
 * stored in its entries, with the owner of the k-mer. `firsts` has the first entry of each group of
 * 16 buckets, `sizes` the number of entries of each bucket. An entry has three bytes, the lowest
 * first: the owner in the lower bits, and the bits of the hash above them. Four more entries follow
 * the last one, so that four can always be read. Few k-mers are hits, and branches that depend on
 * their bucket would be mispredicted, so most of the search has none. `hints` has a bit for each
 * value of the three highest stored bits of the hash in a bucket: it is set if an entry has them.
 * It saves the search for seven in ten k-mers.
 *
 * A record is read once, window by window, and only the hits of one window are in memory. The
 * number of windows of a record is odd, so no k-mer is centred on a border of two windows. A k-mer
 * therefore lies in the same window when the record is read on its other strand.
 *
 * The functions keep no state between calls and touch no Python object, so calls may run in
 * parallel. Digits of bases and codes of codons are those of common.h. Each function returns 0, or
 * -1 if memory runs out.
 */

#include <stdlib.h>

#include "common.h"

enum {
    KMER = 9, /* residues */
    RESIDUE_BITS = 5,
    BATCH = 256, /* k-mers that are looked up together */
    BUCKET_BITS = 21,
    REST_BITS = 13,
    HINT_BITS = 3,
    OWNER_BITS = 11,
    GROUP = 16,
    AT_ONCE = 4, /* entries that are compared without a branch */
    N_OWNERS = 1 << OWNER_BITS,
    CELLULAR = N_OWNERS - 1, /* owner of the k-mers that cells have, too */
    SLOT_BITS = 16,          /* of the set of a window's hits: more slots than a window has k-mers */
    STAMP_BITS = 64 - BUCKET_BITS - REST_BITS,
    N_COLUMNS = 5 /* of a window: k-mers, viral and cellular hits, first owner, its hits */
};

static const uint64_t KMER_MASK = (UINT64_C(1) << KMER * RESIDUE_BITS) - 1;

typedef struct {
    const int32_t *firsts;
    const uint8_t *sizes, *entries, *hints;
    uint64_t limit;
} Index;

/* The state of reading a row of bases from its first to its last codon. */
typedef struct {
    uint64_t forward[3], reverse[3];    /* the latest residues of each frame */
    int32_t n_forward[3], n_reverse[3]; /* residues since the last stop */
    int64_t position;                   /* of the next codon */
    int frame;
} Scan;

/* The hits of a window. The stamp of a slot tells the windows apart, so no slot is cleared. */
typedef struct {
    uint64_t *slots; /* the stamp above the bits of the hash */
    uint64_t stamp;
    int32_t n_of_owner[N_OWNERS];
    uint16_t owners[N_OWNERS]; /* those with a hit */
    int32_t n_owners, n_viral, n_cellular;
    int64_t n_kmers;
} Hits;

static uint64_t hash_kmer(uint64_t kmer) {
    uint64_t hash = kmer * UINT64_C(0xBF58476D1CE4E5B9);
    hash ^= hash >> 29;
    hash *= UINT64_C(0x94D049BB133111EB);
    return hash ^ hash >> 32;
}

static uint8_t complement(uint8_t digit) { return digit < UNKNOWN ? 3 - digit : UNKNOWN; }

/* The residue of each codon on the forward and the reverse strand; N_RESIDUES: none. */
static void fill_residues(const uint8_t *residue_of, uint8_t residues[2][N_CODES]) {
    for (int code = 0; code < N_CODES; code++) {
        int opposite =
            25 * complement(code % 5) + 5 * complement(code / 5 % 5) + complement(code / 25);
        residues[0][code] = residue_of[code];
        residues[1][code] = residue_of[opposite];
    }
}

/* Read codons before `end` until the batch is nearly full. Each adds up to two k-mers. */
static int next_kmers(Scan *scan, const uint8_t *digits, int64_t end,
                      const uint8_t residues[2][N_CODES], uint64_t limit, uint64_t *hashes) {
    int n_kmers = 0;
    for (; scan->position < end && n_kmers < BATCH - 1; scan->position++) {
        const uint8_t *codon = digits + scan->position;
        int code = 25 * codon[0] + 5 * codon[1] + codon[2], frame = scan->frame;
        uint64_t ahead = residues[0][code], back = residues[1][code], hash;
        scan->forward[frame] = (scan->forward[frame] << RESIDUE_BITS | ahead) & KMER_MASK;
        scan->reverse[frame] =
            scan->reverse[frame] >> RESIDUE_BITS | back << (KMER - 1) * RESIDUE_BITS;
        scan->n_forward[frame] = ahead < N_RESIDUES ? scan->n_forward[frame] + 1 : 0;
        scan->n_reverse[frame] = back < N_RESIDUES ? scan->n_reverse[frame] + 1 : 0;
        hash = hash_kmer(scan->forward[frame]);
        hashes[n_kmers] = hash;
        n_kmers += (scan->n_forward[frame] >= KMER) & (hash <= limit); /* unpredictable: no branch */
        hash = hash_kmer(scan->reverse[frame]);
        hashes[n_kmers] = hash;
        n_kmers += (scan->n_reverse[frame] >= KMER) & (hash <= limit);
        scan->frame = frame == 2 ? 0 : frame + 1;
    }
    return n_kmers;
}

/* Add a hit, unless the window has one of the same k-mer. */
static void add_hit(Hits *hits, uint64_t hash, int owner) {
    const uint64_t id = hash & ((UINT64_C(1) << (BUCKET_BITS + REST_BITS)) - 1);
    const uint64_t stamped = hits->stamp << (BUCKET_BITS + REST_BITS) | id;
    uint64_t slot = id & ((1 << SLOT_BITS) - 1);
    while (hits->slots[slot] >> (BUCKET_BITS + REST_BITS) == hits->stamp) {
        if (hits->slots[slot] == stamped)
            return;
        slot = (slot + 1) & ((1 << SLOT_BITS) - 1);
    }
    hits->slots[slot] = stamped;
    if (owner == CELLULAR) {
        hits->n_cellular++;
        return;
    }
    hits->n_viral++;
    if (!hits->n_of_owner[owner]++)
        hits->owners[hits->n_owners++] = (uint16_t)owner;
}

/* The sum of the first k of 16 bytes; k < 16. The bytes are read as little-endian numbers. */
static uint32_t sum_of_first(const uint8_t *bytes, int k) {
    const uint64_t even = UINT64_C(0x00ff00ff00ff00ff);
    uint64_t low, high, sums;
    memcpy(&low, bytes, sizeof low);
    memcpy(&high, bytes + sizeof low, sizeof high);
    low &= k < 8 ? (UINT64_C(1) << 8 * (k & 7)) - 1 : UINT64_MAX;
    high &= k > 8 ? (UINT64_C(1) << 8 * (k & 7)) - 1 : 0;
    sums = (low & even) + (low >> 8 & even) + (high & even) + (high >> 8 & even);
    return (uint32_t)(sums * UINT64_C(0x0001000100010001) >> 48);
}

static uint32_t read_entry(const uint8_t *entry) {
    return entry[0] | (uint32_t)entry[1] << 8 | (uint32_t)entry[2] << 16;
}

/* The owner of the entry with these bits of the hash; -1: none of the entries has them. */
static int find_owner(const uint8_t *entries, int size, uint32_t rest) {
    int owner = -1;
    for (int i = 0; i < AT_ONCE; i++) {
        uint32_t value = read_entry(entries + 3 * i);
        int is_found = (i < size) & (value >> OWNER_BITS == rest);
        owner = is_found ? (int)(value & (N_OWNERS - 1)) : owner;
    }
    for (int i = AT_ONCE; i < size; i++) {
        uint32_t value = read_entry(entries + 3 * i);
        if (value >> OWNER_BITS == rest)
            owner = (int)(value & (N_OWNERS - 1));
    }
    return owner;
}

/* Drop the k-mers that no entry has, by the hints; return the number of the others. */
static int drop_misses(const Index *index, uint64_t *hashes, int n) {
    int n_kept = 0;
    for (int i = 0; i < n; i++)
        __builtin_prefetch(index->hints + (hashes[i] & ((1 << BUCKET_BITS) - 1)));
    for (int i = 0; i < n; i++) {
        uint64_t hash = hashes[i];
        int bit = hash >> (BUCKET_BITS + REST_BITS - HINT_BITS) & ((1 << HINT_BITS) - 1);
        hashes[n_kept] = hash;
        n_kept += index->hints[hash & ((1 << BUCKET_BITS) - 1)] >> bit & 1;
    }
    return n_kept;
}

/* Look up some k-mers. Memory is prefetched for all of them before the first one is compared. */
static void look_up(const Index *index, uint64_t *hashes, int n, Hits *hits) {
    int32_t places[BATCH];
    uint8_t sizes[BATCH];
    hits->n_kmers += n;
    n = drop_misses(index, hashes, n);
    for (int i = 0; i < n; i++) {
        uint64_t bucket = hashes[i] & ((1 << BUCKET_BITS) - 1);
        __builtin_prefetch(index->firsts + bucket / GROUP);
        __builtin_prefetch(index->sizes + bucket);
    }
    for (int i = 0; i < n; i++) {
        uint64_t bucket = hashes[i] & ((1 << BUCKET_BITS) - 1);
        const uint8_t *group = index->sizes + bucket / GROUP * GROUP;
        places[i] = index->firsts[bucket / GROUP] + (int32_t)sum_of_first(group, bucket % GROUP);
        sizes[i] = group[bucket % GROUP];
        __builtin_prefetch(index->entries + 3 * (size_t)places[i]);
    }
    for (int i = 0; i < n; i++) {
        uint32_t rest = hashes[i] >> BUCKET_BITS & ((1 << REST_BITS) - 1);
        int owner = find_owner(index->entries + 3 * (size_t)places[i], sizes[i], rest);
        if (owner >= 0)
            add_hit(hits, hashes[i], owner);
    }
}

/* Write the row of a window, and begin the next one. Owner 0 is no name; ties go to the lowest. */
static void close_window(Hits *hits, int64_t *row) {
    int64_t best = 0;
    for (int32_t i = 0; i < hits->n_owners; i++) {
        int64_t owner = hits->owners[i];
        int32_t n = hits->n_of_owner[owner], n_best = best ? hits->n_of_owner[best] : 0;
        if (owner && (n > n_best || (n == n_best && owner < best)))
            best = owner;
    }
    row[0] = hits->n_kmers;
    row[1] = hits->n_viral;
    row[2] = hits->n_cellular;
    row[3] = best;
    row[4] = best ? hits->n_of_owner[best] : 0;
    for (int32_t i = 0; i < hits->n_owners; i++)
        hits->n_of_owner[hits->owners[i]] = 0;
    hits->n_kmers = hits->n_owners = hits->n_viral = hits->n_cellular = 0;
    if (++hits->stamp >> STAMP_BITS) {
        memset(hits->slots, 0, sizeof(uint64_t) << SLOT_BITS);
        hits->stamp = 1;
    }
}

static Hits *open_hits(void) {
    Hits *hits = calloc(1, sizeof *hits);
    if (!hits)
        return NULL;
    hits->stamp = 1;
    hits->slots = calloc((size_t)1 << SLOT_BITS, sizeof(uint64_t));
    if (!hits->slots) {
        free(hits);
        return NULL;
    }
    return hits;
}

static void close_hits(Hits *hits) {
    if (hits)
        free(hits->slots);
    free(hits);
}

/* One after the last codon of a window: its k-mers are those centred before the next window.
 *
 * The k-mer that ends with the codon at p is centred at 2p - 21 half bases, an odd number. As the
 * number of windows is odd, no window begins at an odd number of half bases. */
static int64_t end_of_window(int64_t n, int64_t n_windows, int64_t window) {
    int64_t next_start = 2 * n * (window + 1) / n_windows; /* half bases */
    return window + 1 < n_windows ? (next_start + 21) / 2 + 1 : n - 2;
}

/* Compute the hints of the entries, which are ordered by bucket. hints: (2^21,), zeros. */
int known_hints(const uint8_t *sizes, const uint8_t *entries, uint8_t *hints) {
    for (int64_t bucket = 0; bucket < INT64_C(1) << BUCKET_BITS; bucket++)
        for (int i = 0; i < sizes[bucket]; i++, entries += 3)
            hints[bucket] |= 1 << (entries[2] >> (8 - HINT_BITS));
    return 0;
}

/* Look up each piece of the digits in the index, window by window.
 *
 * n_windows: of each piece, odd. A window must have fewer than 2^15 bases. rows: (sum of n_windows,
 * N_COLUMNS), by piece and window. */
int known_hits(const uint8_t *digits, const int64_t *starts, const int64_t *lengths,
               const int64_t *n_windows, int64_t n, const uint8_t *residue_of, uint64_t limit,
               const int32_t *firsts, const uint8_t *sizes, const uint8_t *entries,
               const uint8_t *hints, int64_t *rows) {
    const Index index = {firsts, sizes, entries, hints, limit};
    uint8_t residues[2][N_CODES];
    uint64_t hashes[BATCH];
    Hits *hits = open_hits();
    if (!hits)
        return -1;
    fill_residues(residue_of, residues);
    for (int64_t i = 0; i < n; i++) {
        Scan scan = {0};
        for (int64_t window = 0; window < n_windows[i]; window++, rows += N_COLUMNS) {
            int64_t end = end_of_window(lengths[i], n_windows[i], window);
            while (scan.position < end) {
                int n_kmers =
                    next_kmers(&scan, digits + starts[i], end, residues, limit, hashes);
                look_up(&index, hashes, n_kmers, hits);
            }
            close_window(hits, rows);
        }
    }
    close_hits(hits);
    return 0;
}
