/* Sample nine-residue k-mers, and look them up in the index of known viruses.
 *
 * A k-mer is nine residues without a stop or an unknown base. Both strands are translated in all
 * frames by the standard code, so a record and its reverse complement have the same k-mers. A
 * residue has five bits, and a k-mer 45. Its hash is a bijection of 64 bits, so equal hashes are
 * equal k-mers.
 *
 * Every sequence samples the same k-mers, about one in two. A k-mer has six words of four residues,
 * and a rank is a hash of a word. A k-mer is sampled if a word at an even offset from its end has a
 * lower rank than all words at odd offsets, and if its hash is at most a limit. Two k-mers that
 * overlap by eight residues are thus seldom both sampled, and two hits are seldom a single match by
 * chance. These are a kind of syncmers (Edgar 2021, doi:10.7717/peerj.10805).
 *
 * The index is a hash table. The lowest bits of a hash choose a bucket, and the next ones are
 * stored in its entries, with the node of the k-mer: a taxon and an owner. `firsts` has the first
 * entry of each group of 32 buckets. `sizes` has the number of entries of each bucket, two buckets
 * to a byte, the lower one first. An entry has three bytes, the lowest first: the node in the lower
 * bits, and the bits of the hash above them. Four more entries follow the last one, so that four
 * can always be read. Few k-mers are hits, and branches that depend on their bucket would be
 * mispredicted, so most of the search has none.
 *
 * Two filters save the search for all but one in fifty k-mers that the index does not have. They
 * are asked one after the other, because the first one fits into the cache of a core. `hints` has a
 * byte for two buckets, with a bit for each value of the three highest stored bits of the hash. The
 * bit is set if an entry has them, which is so for three in ten k-mers. `filter` has a word for
 * eight buckets, in which each entry sets two bits (Putze et al. 2007,
 * doi:10.1007/978-3-540-72845-0_9). A few k-mers are looked up without the filters, since making
 * them takes longer.
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
    N_FRAMES = 3,
    RESIDUE_BITS = 5,
    WORD = 4, /* residues; their ranks decide which k-mers are sampled */
    RANK_BITS = 16,
    BATCH = 256, /* k-mers that are looked up together */
    NEARLY_FULL = BATCH - 1, /* since a codon adds up to two */
    BUCKET_BITS = 22,
    REST_BITS = 12,
    HINT_BITS = 3,
    N_HINTS = 1 << (BUCKET_BITS - 1), /* two buckets share the hints of their entries */
    WORD_BITS = 3,                    /* 2^3 buckets share a word of the filter */
    NODE_BITS = 12,
    GROUP = 32,
    AT_ONCE = 4, /* entries that are compared without a branch */
    N_NODES = 1 << NODE_BITS,
    CELLULAR = N_NODES - 1, /* node of the k-mers that cells have, too */
    SLOT_BITS = 16,          /* of the set of a window's hits: more slots than a window has k-mers */
    STAMP_BITS = 64 - BUCKET_BITS - REST_BITS,
    N_COLUMNS = 5 /* of a window: k-mers, viral and cellular hits, first owner, its hits */
};

static const uint64_t KMER_MASK = (UINT64_C(1) << KMER * RESIDUE_BITS) - 1;
static const uint64_t WORD_MASK = (UINT64_C(1) << WORD * RESIDUE_BITS) - 1;

typedef struct {
    const int32_t *firsts;
    const uint8_t *sizes, *entries, *hints;
    const uint64_t *filter;
    int has_filters;
    const uint16_t *owner_of; /* of a node; hits are counted by owner */
    uint64_t limit;
} Index;

/* The ranks of the latest words of a frame. */
typedef struct {
    uint64_t latest; /* four ranks, the latest one in the lowest bits */
    uint32_t lowest; /* rank of the latest word and of those two and four words before it */
} Ranks;

/* The latest residues of a frame on one strand. */
typedef struct {
    uint64_t kmer;
    Ranks ranks;
    int32_t n_residues; /* since the last stop */
} Strand;

typedef struct {
    Strand forward, reverse;
    int64_t position; /* of the next codon */
} Frame;

/* The state of reading a row of bases from its first to its last codon. */
typedef struct {
    Frame frames[N_FRAMES];
} Scan;

/* The hits of a window. The stamp of a slot tells the windows apart, so no slot is cleared. */
typedef struct {
    uint64_t *slots; /* the stamp above the bits of the hash */
    uint64_t stamp;
    int32_t n_of_owner[N_NODES];
    uint16_t owners[N_NODES]; /* those with a hit */
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

static uint32_t lower_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Add the next word. It is at one end of a k-mer with six words.
 *
 * Return a number below 0 if this word, or the one two or four words before it, has a lower rank
 * than the other three words of the k-mer, and a number above 0 if one of the others has. */
static int64_t add_word(Ranks *ranks, uint64_t word) {
    const uint64_t mask = (UINT64_C(1) << RANK_BITS) - 1;
    uint32_t rank = ((uint32_t)word * UINT32_C(0x9E3779B1) + UINT32_C(0x7F4A7C15)) >> RANK_BITS;
    uint32_t before = ranks->lowest;
    ranks->lowest = lower_of(rank, lower_of(ranks->latest >> RANK_BITS & mask,
                                            (uint32_t)(ranks->latest >> 3 * RANK_BITS)));
    ranks->latest = ranks->latest << RANK_BITS | rank;
    return (int64_t)ranks->lowest - before;
}

/* Add a residue behind the latest one; return whether the k-mer that ends with it is sampled. */
static inline int add_residue(Strand *strand, uint64_t residue) {
    strand->kmer = (strand->kmer << RESIDUE_BITS | residue) & KMER_MASK;
    strand->n_residues = residue < N_RESIDUES ? strand->n_residues + 1 : 0;
    return (add_word(&strand->ranks, strand->kmer & WORD_MASK) < 0) &
           (strand->n_residues >= KMER);
}

/* Add a residue before the latest one; return whether the k-mer that begins with it is sampled. */
static inline int add_residue_before(Strand *strand, uint64_t residue) {
    strand->kmer = strand->kmer >> RESIDUE_BITS | residue << (KMER - 1) * RESIDUE_BITS;
    strand->n_residues = residue < N_RESIDUES ? strand->n_residues + 1 : 0;
    return (add_word(&strand->ranks, strand->kmer >> (KMER - WORD) * RESIDUE_BITS) > 0) &
           (strand->n_residues >= KMER);
}

/* Read a codon of a frame. Write the hashes of its k-mers on both strands, and whether they are
 * sampled. */
static inline void read_codon(Frame *frame, const uint8_t *codon,
                              const uint8_t residues[2][N_CODES], uint64_t hashes[2],
                              int is_sampled[2]) {
    int code = 25 * codon[0] + 5 * codon[1] + codon[2];
    is_sampled[0] = add_residue(&frame->forward, residues[0][code]);
    is_sampled[1] = add_residue_before(&frame->reverse, residues[1][code]);
    hashes[0] = hash_kmer(frame->forward.kmer);
    hashes[1] = hash_kmer(frame->reverse.kmer);
}

/* Add the k-mers of a frame to a batch, until a codon would begin at `end` or the batch is nearly
 * full. Return the number of k-mers in the batch. */
static int add_kmers(Frame *state, const uint8_t *digits, int64_t end,
                     const uint8_t residues[2][N_CODES], uint64_t limit, uint64_t *hashes,
                     int n_kmers) {
    Frame frame = *state; /* a copy stays in registers */
    for (; frame.position < end && n_kmers < NEARLY_FULL; frame.position += N_FRAMES) {
        uint64_t both[2];
        int is_sampled[2];
        read_codon(&frame, digits + frame.position, residues, both, is_sampled);
        for (int strand = 0; strand < 2; strand++) { /* unpredictable: no branch */
            hashes[n_kmers] = both[strand];
            n_kmers += is_sampled[strand] & (both[strand] <= limit);
        }
    }
    *state = frame;
    return n_kmers;
}

static Scan begin_scan(void) {
    Scan scan = {0};
    for (int i = 0; i < N_FRAMES; i++)
        scan.frames[i].position = i;
    return scan;
}

/* Read codons before `end`, frame by frame. Return the number of k-mers: below NEARLY_FULL if there
 * are no more. */
static int next_kmers(Scan *scan, const uint8_t *digits, int64_t end,
                      const uint8_t residues[2][N_CODES], uint64_t limit, uint64_t *hashes) {
    int n_kmers = 0;
    for (int i = 0; i < N_FRAMES; i++)
        n_kmers = add_kmers(&scan->frames[i], digits, end, residues, limit, hashes, n_kmers);
    return n_kmers;
}

/* Add a hit, unless the window has one of the same k-mer. */
static void add_hit(Hits *hits, uint64_t hash, int node, const uint16_t *owner_of) {
    const uint64_t id = hash & ((UINT64_C(1) << (BUCKET_BITS + REST_BITS)) - 1);
    const uint64_t stamped = hits->stamp << (BUCKET_BITS + REST_BITS) | id;
    uint64_t slot = id & ((1 << SLOT_BITS) - 1);
    while (hits->slots[slot] >> (BUCKET_BITS + REST_BITS) == hits->stamp) {
        if (hits->slots[slot] == stamped)
            return;
        slot = (slot + 1) & ((1 << SLOT_BITS) - 1);
    }
    hits->slots[slot] = stamped;
    if (node == CELLULAR) {
        hits->n_cellular++;
        return;
    }
    hits->n_viral++;
    uint16_t owner = owner_of[node];
    if (!hits->n_of_owner[owner]++)
        hits->owners[hits->n_owners++] = owner;
}

/* The sums of the two halves of each byte. */
static uint64_t sum_halves(uint64_t bytes) {
    const uint64_t low = UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (bytes & low) + (bytes >> 4 & low);
}

/* The sum of the first k of 32 half bytes; k < 32. They are read as little-endian numbers. */
static uint32_t sum_of_first(const uint8_t *bytes, int k) {
    const uint64_t even = UINT64_C(0x00ff00ff00ff00ff);
    uint64_t low, high, sums;
    memcpy(&low, bytes, sizeof low);
    memcpy(&high, bytes + sizeof low, sizeof high);
    low &= k < 16 ? (UINT64_C(1) << 4 * (k & 15)) - 1 : UINT64_MAX;
    high &= k > 16 ? (UINT64_C(1) << 4 * (k & 15)) - 1 : 0;
    sums = sum_halves(low) + sum_halves(high);
    return (uint32_t)(((sums & even) + (sums >> 8 & even)) * UINT64_C(0x0001000100010001) >> 48);
}

static uint32_t size_of(const uint8_t *sizes, uint64_t bucket) {
    return sizes[bucket / 2] >> 4 * (bucket & 1) & 15;
}

static uint32_t read_entry(const uint8_t *entry) {
    return entry[0] | (uint32_t)entry[1] << 8 | (uint32_t)entry[2] << 16;
}

/* The node of the entry with these bits of the hash; -1: none of the entries has them. */
static int find_node(const uint8_t *entries, int size, uint32_t rest) {
    int node = -1;
    for (int i = 0; i < AT_ONCE; i++) {
        uint32_t value = read_entry(entries + 3 * i);
        int is_found = (i < size) & (value >> NODE_BITS == rest);
        node = is_found ? (int)(value & (N_NODES - 1)) : node;
    }
    for (int i = AT_ONCE; i < size; i++) {
        uint32_t value = read_entry(entries + 3 * i);
        if (value >> NODE_BITS == rest)
            node = (int)(value & (N_NODES - 1));
    }
    return node;
}

static uint64_t bucket_of(uint64_t hash) { return hash & ((1 << BUCKET_BITS) - 1); }

/* The bits of a k-mer in its word of the filter. */
static uint64_t filter_bits(uint64_t hash) {
    uint64_t rest = hash >> BUCKET_BITS;
    return UINT64_C(1) << (rest & 63) | UINT64_C(1) << (rest >> 6 & 63);
}

/* The bit of a k-mer in its hints. */
static uint8_t hint_bit(uint64_t hash) {
    return hash >> (BUCKET_BITS + REST_BITS - HINT_BITS) & ((1 << HINT_BITS) - 1);
}

/* Drop the k-mers that no entry has, by the hints; return the number of the others. */
static int drop_by_hints(const Index *index, uint64_t *hashes, int n) {
    int n_kept = 0;
    for (int i = 0; i < n; i++)
        __builtin_prefetch(index->hints + (hashes[i] & (N_HINTS - 1)));
    for (int i = 0; i < n; i++) {
        uint64_t hash = hashes[i];
        hashes[n_kept] = hash;
        n_kept += index->hints[hash & (N_HINTS - 1)] >> hint_bit(hash) & 1;
    }
    return n_kept;
}

/* Drop the k-mers that no entry has, by the filter; return the number of the others. */
static int drop_by_filter(const Index *index, uint64_t *hashes, int n) {
    int n_kept = 0;
    for (int i = 0; i < n; i++)
        __builtin_prefetch(index->filter + (bucket_of(hashes[i]) >> WORD_BITS));
    for (int i = 0; i < n; i++) {
        uint64_t hash = hashes[i], bits = filter_bits(hash);
        hashes[n_kept] = hash;
        n_kept += (index->filter[bucket_of(hash) >> WORD_BITS] & bits) == bits;
    }
    return n_kept;
}

/* Look up some k-mers. Memory is prefetched for all of them before the first one is compared. */
static void look_up(const Index *index, uint64_t *hashes, int n, Hits *hits) {
    int32_t places[BATCH];
    uint8_t sizes[BATCH];
    hits->n_kmers += n;
    if (index->has_filters)
        n = drop_by_filter(index, hashes, drop_by_hints(index, hashes, n));
    for (int i = 0; i < n; i++) {
        uint64_t bucket = bucket_of(hashes[i]);
        __builtin_prefetch(index->firsts + bucket / GROUP);
        __builtin_prefetch(index->sizes + bucket / 2);
    }
    for (int i = 0; i < n; i++) {
        uint64_t bucket = bucket_of(hashes[i]);
        const uint8_t *group = index->sizes + bucket / GROUP * (GROUP / 2);
        places[i] = index->firsts[bucket / GROUP] + (int32_t)sum_of_first(group, bucket % GROUP);
        sizes[i] = (uint8_t)size_of(index->sizes, bucket);
        __builtin_prefetch(index->entries + 3 * (size_t)places[i]);
    }
    for (int i = 0; i < n; i++) {
        uint32_t rest = hashes[i] >> BUCKET_BITS & ((1 << REST_BITS) - 1);
        int node = find_node(index->entries + 3 * (size_t)places[i], sizes[i], rest);
        if (node >= 0)
            add_hit(hits, hashes[i], node, index->owner_of);
    }
}

/* Forget the hits of a window, and begin the next one. */
static void begin_window(Hits *hits) {
    for (int32_t i = 0; i < hits->n_owners; i++)
        hits->n_of_owner[hits->owners[i]] = 0;
    hits->n_kmers = hits->n_owners = hits->n_viral = hits->n_cellular = 0;
    if (++hits->stamp >> STAMP_BITS) {
        memset(hits->slots, 0, sizeof(uint64_t) << SLOT_BITS);
        hits->stamp = 1;
    }
}

/* Write the row of a window. Owner 0 is no name; ties go to the lowest. */
static void write_row(const Hits *hits, int64_t *row) {
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

/* Write the bucket of each entry of n buckets from `bucket` on; return the number of entries. Four
 * are always written, since the sizes are unpredictable. */
static int list_buckets(const uint8_t *sizes, uint32_t bucket, int n, uint32_t *bucket_of_entry) {
    int n_entries = 0;
    for (uint32_t end = bucket + n; bucket < end; bucket++) {
        int size = (int)size_of(sizes, bucket);
        for (int i = 0; i < AT_ONCE; i++)
            bucket_of_entry[n_entries + i] = bucket;
        for (int i = AT_ONCE; i < size; i++)
            bucket_of_entry[n_entries + i] = bucket;
        n_entries += size;
    }
    return n_entries;
}

/* Make the filters of the entries, which are ordered by bucket.
 *
 * hints: (N_HINTS,), filter: (2^(BUCKET_BITS - WORD_BITS),), zeros. */
int known_filters(const uint8_t *sizes, const uint8_t *entries, uint8_t *hints, uint64_t *filter) {
    enum { BUCKETS_AT_ONCE = 256, MOST_IN_BUCKET = 15 };
    uint32_t buckets[BUCKETS_AT_ONCE * MOST_IN_BUCKET + AT_ONCE];
    for (uint32_t first = 0; first < UINT32_C(1) << BUCKET_BITS; first += BUCKETS_AT_ONCE) {
        int n = list_buckets(sizes, first, BUCKETS_AT_ONCE, buckets);
        for (int i = 0; i < n; i++, entries += 3) {
            uint64_t hash = (uint64_t)(read_entry(entries) >> NODE_BITS) << BUCKET_BITS;
            hints[buckets[i] & (N_HINTS - 1)] |= 1 << hint_bit(hash);
            filter[buckets[i] >> WORD_BITS] |= filter_bits(hash);
        }
    }
    return 0;
}

/* Look up the k-mers of the next window. */
static void read_window(const Index *index, Scan *scan, const uint8_t *digits, int64_t end,
                        const uint8_t residues[2][N_CODES], Hits *hits) {
    uint64_t hashes[BATCH];
    int n_kmers = NEARLY_FULL;
    while (n_kmers >= NEARLY_FULL) {
        n_kmers = next_kmers(scan, digits, end, residues, index->limit, hashes);
        look_up(index, hashes, n_kmers, hits);
    }
}

/* Look up each piece of the digits in the index, window by window.
 *
 * n_windows: of each piece, odd. A window must have fewer than 2^15 bases. has_filters: 0 if the
 * hints and the filter are not made. owner_of: (N_NODES,).
 * rows: (sum of n_windows, N_COLUMNS), by piece and window. */
int known_hits(const uint8_t *digits, const int64_t *starts, const int64_t *lengths,
               const int64_t *n_windows, int64_t n, const uint8_t *residue_of, uint64_t limit,
               const int32_t *firsts, const uint8_t *sizes, const uint8_t *entries,
               const uint8_t *hints, const uint64_t *filter, int64_t has_filters,
               const uint16_t *owner_of, int64_t *rows) {
    const Index index = {firsts, sizes, entries, hints, filter, has_filters, owner_of, limit};
    uint8_t residues[2][N_CODES];
    Hits *hits = open_hits();
    if (!hits)
        return -1;
    fill_residues(residue_of, residues);
    for (int64_t i = 0; i < n; i++) {
        Scan scan = begin_scan();
        for (int64_t window = 0; window < n_windows[i]; window++, rows += N_COLUMNS) {
            int64_t end = end_of_window(lengths[i], n_windows[i], window);
            read_window(&index, &scan, digits + starts[i], end, residues, hits);
            write_row(hits, rows);
            begin_window(hits);
        }
    }
    close_hits(hits);
    return 0;
}

/* Look up the k-mers that end with the next residues of a protein, before `end`. */
static void read_protein(const Index *index, Strand *strand, const uint8_t *residues,
                         int64_t first, int64_t end, Hits *hits) {
    uint64_t hashes[BATCH];
    for (int64_t i = first; i < end;) {
        int n_kmers = 0;
        for (; i < end && n_kmers < BATCH; i++) {
            int is_sampled = add_residue(strand, residues[i]);
            uint64_t hash = hash_kmer(strand->kmer);
            if (is_sampled && hash <= index->limit)
                hashes[n_kmers++] = hash;
        }
        look_up(index, hashes, n_kmers, hits);
    }
}

/* Look up each protein in the index, window by window, of fewer than 2^15 residues each.
 *
 * residues: (sum of lengths). The other arguments are those of known_hits. */
int known_protein_hits(const uint8_t *residues, const int64_t *lengths, const int64_t *n_windows,
                       int64_t n, uint64_t limit, const int32_t *firsts, const uint8_t *sizes,
                       const uint8_t *entries, const uint8_t *hints, const uint64_t *filter,
                       int64_t has_filters, const uint16_t *owner_of, int64_t *rows) {
    const Index index = {firsts, sizes, entries, hints, filter, has_filters, owner_of, limit};
    Hits *hits = open_hits();
    if (!hits)
        return -1;
    for (int64_t i = 0; i < n; residues += lengths[i], i++) {
        Strand strand = {0};
        for (int64_t window = 0; window < n_windows[i]; window++, rows += N_COLUMNS) {
            int64_t first = lengths[i] * window / n_windows[i];
            int64_t end = lengths[i] * (window + 1) / n_windows[i];
            read_protein(&index, &strand, residues, first, end, hits);
            write_row(hits, rows);
            begin_window(hits);
        }
    }
    close_hits(hits);
    return 0;
}

/* Count the hits of each piece by node; equal k-mers count once in a window.
 *
 * The arguments up to `has_filters` are those of known_hits. n_kmers: (n,). rows: piece, node, hits
 * of each node of a window, with room for all nodes or all k-mers of every window. */
int known_nodes(const uint8_t *digits, const int64_t *starts, const int64_t *lengths,
                const int64_t *n_windows, int64_t n, const uint8_t *residue_of, uint64_t limit,
                const int32_t *firsts, const uint8_t *sizes, const uint8_t *entries,
                const uint8_t *hints, const uint64_t *filter, int64_t has_filters,
                int64_t *n_kmers, int32_t *rows, int64_t *n_rows) {
    uint16_t owner_of[N_NODES];
    const Index index = {firsts, sizes, entries, hints, filter, has_filters, owner_of, limit};
    uint8_t residues[2][N_CODES];
    Hits *hits = open_hits();
    if (!hits)
        return -1;
    for (int node = 0; node < N_NODES; node++)
        owner_of[node] = (uint16_t)node;
    fill_residues(residue_of, residues);
    *n_rows = 0;
    for (int64_t i = 0; i < n; i++) {
        Scan scan = begin_scan();
        n_kmers[i] = 0;
        for (int64_t window = 0; window < n_windows[i]; window++) {
            int64_t end = end_of_window(lengths[i], n_windows[i], window);
            read_window(&index, &scan, digits + starts[i], end, residues, hits);
            n_kmers[i] += hits->n_kmers;
            for (int32_t j = 0; j < hits->n_owners; j++, ++*n_rows) {
                int32_t *row = rows + 3 * *n_rows;
                row[0] = (int32_t)i;
                row[1] = hits->owners[j];
                row[2] = hits->n_of_owner[hits->owners[j]];
            }
            begin_window(hits);
        }
    }
    close_hits(hits);
    return 0;
}
