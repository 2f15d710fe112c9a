/* Look up k-mers of residues, and find terminal repeats and peptides. */

#include "kmers.h"

#include <stdlib.h>

#include "orfs.h"

enum {
    REST_BITS = 13,
    CLASS_BITS = 3,
    N_BUCKETS = 2 << BUCKET_BITS,
    GROUP = 16 /* buckets that share an index of their first entry */
};

static int is_in_sample(uint64_t hash) { return (hash & (RARITY - 1)) == 0; }

static int64_t bucket_of(uint64_t hash) {
    int64_t bucket = (int64_t)(hash >> (64 - BUCKET_BITS));
    return is_in_sample(hash) ? bucket + (1 << BUCKET_BITS) : bucket;
}

static int rest_of(uint64_t hash) {
    return (hash >> (64 - BUCKET_BITS - REST_BITS)) & ((1 << REST_BITS) - 1);
}

/* The sum of 16 bytes, eight of them in each argument. */
static int32_t sum_of_bytes(uint64_t low, uint64_t high) {
    const uint64_t even = UINT64_C(0x00ff00ff00ff00ff);
    uint64_t sums = (low & even) + (low >> 8 & even) + (high & even) + (high >> 8 & even);
    return (int32_t)(sums * UINT64_C(0x0001000100010001) >> 48);
}

/* The first n of eight bytes, the others zero; on little-endian processors, as all of ours are. */
static uint64_t first_bytes(const uint8_t *bytes, int n) {
    uint64_t eight;
    memcpy(&eight, bytes, sizeof eight);
    return n < 8 ? eight & ((UINT64_C(1) << 8 * n) - 1) : eight;
}

/* The first entry of a bucket. */
static int32_t first_entry(const KmerTable *kmers, int64_t bucket) {
    int64_t group = bucket / GROUP;
    int n = (int)(bucket % GROUP);
    const uint8_t *counts = kmers->n_of_bucket + group * GROUP;
    uint64_t high = n > 8 ? first_bytes(counts + 8, n - 8) : 0;
    return kmers->first[group] + sum_of_bytes(first_bytes(counts, n), high);
}

/* One bit for each prefix that the entries of a bucket have; n entries can be read. */
static inline int beginnings(const uint16_t *entries, int count, int64_t n) {
    enum { SHIFT = REST_BITS + CLASS_BITS - HINT_BITS, FEW = 3 };
    int bits = 0;
    if (count <= FEW && n >= FEW) { /* nearly always; the loop needs no unpredictable branch */
        for (int i = 0; i < FEW; i++)
            bits |= (i < count) << (entries[i] >> SHIFT);
    } else {
        for (int i = 0; i < count; i++)
            bits |= 1 << (entries[i] >> SHIFT);
    }
    return bits;
}

/* Prepare a table of k-mers: fill the first entry of each group of buckets, and the hints. Count
 * the entries with an unknown class. */
int index_kmer_table(const uint8_t *n_of_bucket, const uint16_t *entries, int64_t n, int32_t *first,
               uint8_t *hints, int64_t *n_strange) {
    enum { EACH = 1 << HINT_BITS };
    int64_t entry = 0;
    for (int64_t group = 0; group < N_BUCKETS / GROUP; group++) {
        const uint8_t *counts = n_of_bucket + group * GROUP;
        first[group] = (int32_t)entry;
        entry += sum_of_bytes(first_bytes(counts, 8), first_bytes(counts + 8, 8));
    }
    entry = 0;
    for (int64_t bucket = 0; bucket < N_BUCKETS / 2; bucket += 2) {
        int count = n_of_bucket[bucket], of_both = count + n_of_bucket[bucket + 1];
        hints[bucket / 2] = beginnings(entries + entry, count, n - entry) |
                            beginnings(entries + entry + count, of_both - count,
                                       n - entry - count) << EACH;
        entry += of_both;
    }
    *n_strange = 0;
    for (int64_t low = 0; low < n; low += 1 << 15) {
        int64_t high = low + (1 << 15) < n ? low + (1 << 15) : n;
        uint16_t here = 0;
        for (int64_t i = low; i < high; i++)
            here += (uint16_t)((entries[i] - 1) & ((1 << CLASS_BITS) - 1)) >= N_KMER_CLASSES - 1;
        *n_strange += here;
    }
    return 0;
}

/* The class of a hash among the n entries of its bucket; 0: none. */
static uint8_t class_among(const uint16_t *entries, int n, uint64_t hash) {
    int rest = rest_of(hash);
    for (int i = 0; i < n; i++) {
        if (entries[i] >> CLASS_BITS == rest)
            return entries[i] & ((1 << CLASS_BITS) - 1);
        if (entries[i] >> CLASS_BITS > rest)
            break;
    }
    return 0;
}

/* Whether a k-mer may have a class. All of the sample may: most of its buckets are full. */
static int may_have_class(const KmerTable *kmers, uint64_t hash) {
    uint64_t hint = hint_of(hash);
    return is_in_sample(hash) | (kmers->hints[hint >> 3] >> (hint & 7) & 1);
}

/* The class of each hash. The steps prefetch for many hashes, so that waits for memory overlap. */
void vnp_classes_of_hashes(const KmerTable *kmers, const uint64_t *hashes, int64_t n,
                             uint8_t *classes) {
    enum { AT_ONCE = 128 };
    for (int64_t low = 0; low < n; low += AT_ONCE) {
        int64_t high = low + AT_ONCE < n ? low + AT_ONCE : n, waiting[AT_ONCE];
        int32_t first[AT_ONCE];
        int n_waiting = 0;
        for (int64_t i = low; i < high; i++) {
            classes[i] = 0;
            waiting[n_waiting] = i;
            n_waiting += may_have_class(kmers, hashes[i]); /* a branch would be unpredictable */
        }
        for (int i = 0; i < n_waiting; i++) {
            int64_t bucket = bucket_of(hashes[waiting[i]]);
            __builtin_prefetch(kmers->n_of_bucket + bucket);
            __builtin_prefetch(kmers->first + bucket / GROUP);
        }
        for (int i = 0; i < n_waiting; i++) {
            first[i] = first_entry(kmers, bucket_of(hashes[waiting[i]]));
            __builtin_prefetch(kmers->entries + first[i]);
        }
        for (int i = 0; i < n_waiting; i++) {
            uint64_t hash = hashes[waiting[i]];
            classes[waiting[i]] = class_among(kmers->entries + first[i],
                                             kmers->n_of_bucket[bucket_of(hash)], hash);
        }
    }
}

int classes_of_kmers(const int64_t *numbers, int64_t n, const uint8_t *hints,
                     const uint8_t *n_of_bucket, const int32_t *first, const uint16_t *entries,
                     int64_t n_entries, uint8_t *classes) {
    KmerTable kmers = {hints, n_of_bucket, first, entries, n_entries};
    uint64_t *hashes = malloc((n + 1) * sizeof(uint64_t));
    if (!hashes)
        return -1;
    for (int64_t i = 0; i < n; i++)
        hashes[i] = hash_to_find(&kmers, numbers[i]);
    vnp_classes_of_hashes(&kmers, hashes, n, classes);
    free(hashes);
    return 0;
}

/* Terminal repeats */

enum { SEED = 21, BASES_PER_MISMATCH = 50, MOST_PLACES = 8, LONGEST_UNIT = 6 };
static const double MOST_UNKNOWN = 0.2, MOST_OF_ONE_BASE = 0.75, MOST_TANDEM = 0.8;

/* Whether a repeat has low complexity: many unknown bases, much of one base, or a short unit. */
static int is_plain(const uint8_t *repeat, int64_t n) {
    int64_t counts[UNKNOWN + 1] = {0}, most = 0;
    for (int64_t i = 0; i < n; i++)
        counts[repeat[i]]++;
    for (int base = 0; base < UNKNOWN; base++)
        most = at_least(counts[base], most);
    if (counts[UNKNOWN] > MOST_UNKNOWN * n || most > MOST_OF_ONE_BASE * n)
        return 1;
    for (int64_t unit = 1; unit <= LONGEST_UNIT && unit < n; unit++) {
        int64_t n_same = 0;
        for (int64_t i = unit; i < n; i++)
            n_same += repeat[i] == repeat[i - unit];
        if ((double)n_same / (n - unit) > MOST_TANDEM)
            return 1;
    }
    return 0;
}

/* The first place at or after `from` where the first SEED bases of a text occur again; n: none. */
static int64_t find_seed(const uint8_t *text, int64_t n, int64_t from) {
    uint64_t seed, eight;
    memcpy(&seed, text, sizeof seed);
    for (; from + SEED <= n; from++) {
        memcpy(&eight, text + from, sizeof eight);
        if (eight == seed && memcmp(text, text + from, SEED) == 0)
            return from;
    }
    return n;
}

/* Length of the longest repeat of the start of a text, up to half of it, that ends the text; 0:
 * none. */
static int64_t direct_repeat(const uint8_t *text, int64_t n) {
    int64_t n_places = 0;
    if (n < 2 * SEED || is_plain(text, SEED))
        return 0;
    for (int64_t place = 0; n_places <= MOST_PLACES; place += SEED, n_places++)
        if ((place = find_seed(text, n, place)) == n)
            break;
    if (n_places > MOST_PLACES)
        return 0;
    for (int64_t place = (n + 1) / 2; (place = find_seed(text, n, place)) < n; place++) {
        int64_t n_bases = n - place, n_different = 0;
        for (int64_t i = 0; i < n_bases; i++)
            n_different += text[i] != text[place + i];
        if (n_different <= n_bases / BASES_PER_MISMATCH && !is_plain(text, n_bases))
            return n_bases;
    }
    return 0;
}

/* Number of first bases that both strands share; 0: too few. */
static int64_t inverted_repeat(const uint8_t *text, int64_t n) {
    int64_t n_bases = 0;
    while (n_bases < n / 2 && text[n_bases] == opposite(text[n - 1 - n_bases]))
        n_bases++;
    return n_bases < SEED || is_plain(text, n_bases) ? 0 : n_bases;
}

/* The base from which a circle of digits comes first in lexical order. Two candidates are compared;
 * one that loses after n equal bases takes the n places behind it along. */
int first_rotation(const uint8_t *digits, int64_t n, int64_t *first) {
    int64_t one = 0, other = 1, n_equal = 0;
    while (one < n && other < n && n_equal < n) {
        uint8_t of_one = digits[(one + n_equal) % n], of_other = digits[(other + n_equal) % n];
        if (of_one == of_other) {
            n_equal++;
            continue;
        }
        if (of_one > of_other)
            one += n_equal + 1;
        else
            other += n_equal + 1;
        other += one == other;
        n_equal = 0;
    }
    *first = one < other ? one : other;
    return 0;
}

/* Whether the opposite strand of each piece comes first in lexical order. */
int reverse_first(const uint8_t *digits, const int64_t *starts, const int64_t *lengths, int64_t n,
                  uint8_t *is_reverse) {
    for (int64_t piece = 0; piece < n; piece++) {
        const uint8_t *left = digits + starts[piece], *right = left + lengths[piece];
        int64_t n_left = lengths[piece];
        for (; n_left > 0 && *left == opposite(right[-1]); n_left--) {
            left++;
            right--;
        }
        is_reverse[piece] = n_left > 0 && opposite(right[-1]) < *left;
    }
    return 0;
}

/* Lengths of the terminal repeats of each piece, direct and inverted; 0: none. A direct repeat is
 * searched on both strands, as its first bases must agree. */
int terminal_repeats(const uint8_t *digits, const int64_t *starts, const int64_t *lengths,
                     int64_t n, int64_t *direct, int64_t *inverted) {
    uint8_t *reverse = malloc(longest_of(lengths, n) + 1);
    if (!reverse)
        return -1;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *forward = digits + starts[i];
        for (int64_t place = 0; place < lengths[i]; place++)
            reverse[place] = opposite(forward[lengths[i] - 1 - place]);
        direct[i] = at_least(direct_repeat(forward, lengths[i]),
                             direct_repeat(reverse, lengths[i]));
        inverted[i] = inverted_repeat(forward, lengths[i]);
    }
    free(reverse);
    return 0;
}

/* Peptides */

/* Find where a strand encodes one of some peptides, in any frame: their first bases, ascending.
 *
 * The table has one byte per place and code of a codon, and in it one bit per pattern: set if the
 * pattern allows this codon there, or has ended. The caller allocates one place per four bases. */
int find_peptides(const uint8_t *digits, int64_t n, const uint8_t *table, int64_t longest,
                  int64_t shortest, int64_t *places, int64_t *n_places) {
    int64_t n_codes = n + 3 * longest, n_found = 0;
    uint8_t *codes = malloc(n_codes);
    if (!codes)
        return -1;
    for (int64_t i = 0; i < n - 2; i++)
        codes[i] = 25 * digits[i] + 5 * digits[i + 1] + digits[i + 2];
    for (int64_t i = at_least(0, n - 2); i < n_codes; i++)
        codes[i] = N_CODES - 1; /* after the end: no residue */
    for (int64_t i = 0; i + 3 * shortest <= n; i++) {
        uint8_t found = table[codes[i]] & table[N_CODES + codes[i + 3]]; /* mostly 0 */
        for (int64_t place = 2; found && place < longest; place++)
            found &= table[N_CODES * place + codes[i + 3 * place]];
        if (found)
            places[n_found++] = i;
    }
    free(codes);
    *n_places = n_found;
    return 0;
}
