/* Read pieces of sequences in one pass: find stretches, look up words, count, and compute features.
 * The last part writes and reads the rows of tables.
 *
 * ground/library.py calls these functions and documents the arrays. No function keeps state between
 * calls or touches Python, so calls may run in parallel. Only the kernels stay, which are chosen
 * when the library is loaded. Each function returns 0, or -1 if memory runs out.
 * The digits of A, C, G and T are 0 to 3; any other letter is 4. The code of a codon is
 * 25 a + 5 b + c. Do not compile with -ffast-math: scores must be the same on every machine.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNKNOWN = 4,
    N_CODES = 125,
    N_CODONS = 64,
    N_JUNCTIONS = 256,
    N_RESIDUES = 20,
    N_PAIRS = N_RESIDUES * N_RESIDUES,
    N_PALINDROMES = 19,
    N_FIGURES = 36,
    N_OWNERS = 7, /* none, and the six of word tables */
    NOT_YET = 255, /* instead of an owner: not looked up yet */
    N_FEATURES = 4 * N_CODONS + 2 * N_JUNCTIONS + N_PAIRS + N_PALINDROMES + N_FIGURES +
                 N_OWNERS - 1,
    N_LAYOUT = 12,
    N_TETRA = 136, /* tetranucleotides, each with its reverse complement */
    SHORTEST = 5,  /* codons of a stretch, from here on */
    LONG = 20,
    GENE_LIKE = 30,
    GENE = 60,
    MOST_STRETCHES = 6,
    WORD = 9, /* residues */
    ONE_VIRAL = 2,
    ONE_CELLULAR = 4,
    RARITY = 8,
    BUCKET_BITS = 20,
    REST_BITS = 13,
    OWNER_BITS = 3,
    HINT_BITS = 2, /* of the rest, after the bits of the bucket */
    N_BUCKETS = 2 << BUCKET_BITS,
    GROUP = 16, /* buckets that share an index of their first entry */
    ABUTTING = 60, /* bases */
    N_LEVELS = 127, /* from the mean of a feature to its limit */
    N_SHAPE = 3,    /* figures of genes: longest stretch, the same beyond chance, genes per kb */
    N_PARTS = 20    /* of the pieces of a record by GC */
};

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 ""
#endif

/* The digest of the source from which the library was built. */
const char source_sha256[] = SOURCE_SHA256;

static const double MOST_COVERED = 0.3 * 3; /* bases of a codon */
static const double LEAST_GAP = -200, MOST_GAP = 2000;
static const double STEPS = 16777216; /* per unit, in sums of features */
static const float LEAST_GC = 0.05F, MOST_GC = 0.95F;
static const double SIGNS[N_SHAPE] = {-1, -1, 1}; /* in which genes of viruses differ from hosts' */
static const double MOST_SHAPE = 1; /* deviations; larger ones suggest no genes, not viral ones */

/* Tables of one genetic code, indexed by the code of a codon. */
typedef struct {
    const uint8_t *is_stop;
    const uint8_t *synonym; /* the codon that it counts as */
    const uint8_t *residue; /* N_RESIDUES: none */
} Code;

typedef struct {
    const uint8_t *hints; /* a bit per prefix of hashes: does a word outside the sample have it */
    const uint8_t *n_of_bucket;
    const int32_t *first; /* first entry of each group of buckets */
    const uint16_t *entries;
    int64_t n_entries;
} Words;

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
    int64_t first_stop[2]; /* on each strand, in the previous piece */
    int32_t *n_of_length;
    uint64_t *covered;
} Room;

/* How much a codon suggests the frame of a gene, rather than another open frame over the same
 * bases; in the order AAA, AAC ... By scripts/weights/coding_codons.py, on labelled sequences. */
static const int8_t CODING[N_CODONS] = {
    6, 4, 6, 3, 0, 1, 2, 0, -5, -2, -5, -4, -2, 2, 4, 4,
    0, -3, 1, -4, -5, -2, 0, -2, -2, 0, -1, 1, -6, 1, 1, 1,
    8, 4, 4, 7, -1, 1, 2, 1, 3, 1, 1, 3, -2, 1, 1, 2,
    0, 4, 0, 4, -5, -2, -1, -3, 0, -9, 0, -14, -3, 3, -1, 1,
};

/* The same by strand and code of the forward strand; 0 for a codon with an unknown base. */
static int8_t coding[2][N_CODES];

static uint8_t opposite(uint8_t digit) { return digit < UNKNOWN ? 3 - digit : UNKNOWN; }

static int64_t at_least(int64_t least, int64_t value) { return value < least ? least : value; }

/* A call of memset: it is faster than the code that compilers inline for a short one. */
__attribute__((noinline)) static void clear(void *values, size_t n_bytes) {
    memset(values, 0, n_bytes);
}

static double larger(double a, double b) { return a > b ? a : b; }

/* The nearest whole number, half to even, for values below 2^51. */
static double nearest(double value) {
    const double shift = 6755399441055744; /* 1.5 * 2^52: numbers near it are whole */
    return (value + shift) - shift;
}

static int n_bits_of(uint64_t bits) {
    bits -= (bits >> 1) & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + ((bits >> 2) & UINT64_C(0x3333333333333333));
    bits = (bits + (bits >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int)((bits * UINT64_C(0x0101010101010101)) >> 56);
}

/* The code of a codon on the opposite strand. */
static uint8_t other_of(int code) {
    return 25 * opposite(code % 5) + 5 * opposite(code / 5 % 5) + opposite(code / 25);
}

__attribute__((constructor)) static void fill_coding(void) {
    for (int number = 0; number < N_CODONS; number++) {
        int code = 25 * (number >> 4) + 5 * (number >> 2 & 3) + (number & 3);
        coding[0][code] = coding[1][other_of(code)] = CODING[number];
    }
}

/* Encode letters of either case as digits; U is T. Without a table, compilers vectorise this. */
int encode_bases(const uint8_t *letters, int64_t n, uint8_t *restrict digits) {
    for (int64_t i = 0; i < n; i++) {
        uint8_t letter = letters[i] | 0x20, is_t = (letter & 0xfe) == 't'; /* or u */
        uint8_t less = 4 * (letter == 'a') + 3 * (letter == 'c') + 2 * (letter == 'g') + is_t;
        digits[i] = UNKNOWN - less;
    }
    return 0;
}

/* Number the tetranucleotides: a table indexed by the code of a codon and the next digit. A word
 * and its reverse complement have the same number. With an unknown base, it is N_TETRA. */
static void number_tetra(uint8_t tetra[5 * N_CODES]) {
    uint8_t number_of[256], n_numbers = 0;
    for (int word = 0; word < 256; word++) {
        int other = 0;
        for (int i = 0; i < 4; i++)
            other = 4 * other + 3 - (word >> 2 * i & 3);
        number_of[word] = other < word ? number_of[other] : n_numbers++;
    }
    memset(tetra, N_TETRA, 5 * N_CODES);
    for (int word = 0; word < 256; word++) {
        int codon = word >> 2;
        int code = 25 * (codon >> 4) + 5 * (codon >> 2 & 3) + (codon & 3);
        tetra[5 * code + (word & 3)] = number_of[word];
    }
}

/* Read a row of digits: fill codes and tetra, (n,), and for each strand the first n_stops of
 * stops, (2, n). */
int read_bases(const uint8_t *digits, int64_t n, const uint8_t *is_stop, uint8_t *restrict codes,
               uint8_t *restrict tetra, int32_t *restrict stops, int64_t *n_stops) {
    uint8_t kinds[N_CODES], number_of[5 * N_CODES];
    int64_t n_forward = 0, n_reverse = 0;
    for (int code = 0; code < N_CODES; code++)
        kinds[code] = is_stop[code] | is_stop[other_of(code)] << 1;
    number_tetra(number_of);
    for (int64_t i = 0; i < n - 2; i++)
        codes[i] = 25 * digits[i] + 5 * digits[i + 1] + digits[i + 2];
    for (int64_t i = 0; i < n - 3; i++)
        tetra[i] = number_of[5 * codes[i] + digits[i + 3]];
    for (int64_t i = 0; i < n - 2; i++) {
        uint8_t kind = kinds[codes[i]];
        stops[n_forward] = stops[n + n_reverse] = (int32_t)i;
        n_forward += kind & 1;
        n_reverse += kind >> 1;
    }
    n_stops[0] = n_forward;
    n_stops[1] = n_reverse;
    return 0;
}

static Bases bases_of(const uint8_t *digits, int64_t n, const uint8_t *codes,
                      const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops) {
    Bases bases = {digits, n, codes, tetra, {stops, stops + n}, {n_stops[0], n_stops[1]}};
    return bases;
}

/* Functions named open_* expect a zeroed struct. If memory runs out, the caller still closes it. */

static void close_room(Room *room) {
    for (int row = 0; row < 6; row++)
        free(room->rows[row]);
    free(room->sorted);
    free(room->kept);
    free(room->n_of_length);
    free(room->covered);
}

static int64_t longest_of(const int64_t *lengths, int64_t n) {
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++)
        longest = at_least(longest, lengths[i]);
    return longest;
}

static int open_room(Room *room, int64_t longest) {
    size_t n = longest / 3 + 2;
    int is_short = 0;
    for (int row = 0; row < 6; row++)
        is_short |= !(room->rows[row] = malloc(n * sizeof(Stretch)));
    /* a kept stretch and the stop after it have at least two codons */
    room->sorted = malloc(6 * n * sizeof(Stretch));
    room->kept = malloc(6 * n * sizeof(Stretch));
    room->n_of_length = calloc(n, sizeof(int32_t));
    room->covered = malloc((longest / 64 + 1) * sizeof(uint64_t));
    if (is_short || !room->sorted || !room->kept || !room->n_of_length || !room->covered)
        return -1;
    return 0;
}

/* Stretches of a piece */

static void add_stretch(Room *room, int row, int32_t start, int32_t n_codons, int32_t length,
                        int32_t shortest) {
    int32_t strand = row / 3, place = row % 3 + 3 * start, is_kept = n_codons >= shortest;
    Stretch *stretch = room->rows[row] + room->n_rows[row];
    if (n_codons > room->longest[row])
        room->longest[row] = n_codons;
    stretch->strand = strand;
    stretch->start = place;
    stretch->n_codons = n_codons;
    stretch->first = strand ? length - place - 3 * n_codons : place;
    room->n_rows[row] += is_kept; /* no branch: it would be unpredictable */
    room->n_of_length[n_codons] += is_kept;
}

/* Index of the first of n ascending places that is not below a value; `near` is a guess. */
static int64_t first_from(const int32_t *places, int64_t n, int64_t value, int64_t near) {
    int64_t low = near > 0 && near <= n && places[near - 1] < value ? near : 0;
    int64_t step = 16, high;
    for (; low + step <= n && places[low + step - 1] < value; step *= 2)
        low += step;
    high = low + step < n ? low + step : n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (places[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void find_in_strand(const Bases *bases, int strand, int64_t from, int32_t length,
                           int32_t shortest, Room *room) {
    const int32_t *stops = bases->stops[strand];
    int64_t n_stops = bases->n_stops[strand];
    int64_t first = first_from(stops, n_stops, from, room->first_stop[strand]);
    int64_t end = first_from(stops, n_stops, from + length - 2, first);
    int32_t start[3] = {0, 0, 0};
    room->first_stop[strand] = first;
    for (int64_t i = first; i < end; i++) {
        int32_t place = strand ? (int32_t)(from + length - 3 - stops[first + end - 1 - i])
                               : (int32_t)(stops[i] - from);
        int frame = place % 3;
        int32_t codon = place / 3;
        add_stretch(room, 3 * strand + frame, start[frame], codon - start[frame], length, shortest);
        room->n_stops[3 * strand + frame]++;
        start[frame] = codon + 1;
    }
    for (int frame = 0; frame < 3; frame++) {
        int32_t n_whole = length > frame ? (length - frame) / 3 : 0;
        add_stretch(room, 3 * strand + frame, start[frame], n_whole - start[frame], length,
                    shortest);
    }
}

/* The strand whose digits come first in lexical order. */
static int first_strand_of(const uint8_t *digits, int32_t length) {
    int32_t i = 0;
    while (i < length && digits[i] == opposite(digits[length - 1 - i]))
        i++;
    return i < length && digits[i] > opposite(digits[length - 1 - i]);
}

/* Sort stretches, the longest first. Ties are in the order of strand, frame and place. The first
 * strand does not depend on which one is given, so a piece and its reverse complement have the same
 * stretches in the same order. */
static void sort_stretches(Room *room, int32_t shortest, int first_strand) {
    int32_t longest = 0, n_before = 0;
    for (int row = 0; row < 6; row++)
        if (room->longest[row] > longest)
            longest = room->longest[row];
    for (int32_t n_codons = longest; n_codons >= shortest; n_codons--) {
        int32_t n = room->n_of_length[n_codons];
        room->n_of_length[n_codons] = n_before;
        n_before += n;
    }
    for (int rank = 0; rank < 6; rank++) {
        int row = (rank + 3 * first_strand) % 6;
        for (int32_t i = 0; i < room->n_rows[row]; i++) {
            const Stretch *stretch = room->rows[row] + i;
            room->sorted[room->n_of_length[stretch->n_codons]++] = *stretch;
        }
    }
    if (longest >= shortest)
        memset(room->n_of_length + shortest, 0, (longest - shortest + 1) * sizeof(int32_t));
    room->n_found = n_before;
}

/* How much the codons of a stretch suggest a gene; codes: of the piece. */
static int32_t coding_sum(const uint8_t *codes, int32_t length, const Stretch *stretch) {
    const int8_t *of_code = coding[stretch->strand];
    int64_t step = stretch->strand ? -3 : 3;
    int32_t sum = 0;
    codes += stretch->strand ? length - 3 - stretch->start : stretch->start;
    for (int32_t i = 0; i < stretch->n_codons; i++, codes += step)
        sum += of_code[*codes];
    return sum;
}

/* Move the most gene-like of the longest stretches to the front. A stretch through a whole piece
 * has one codon less in some frames than in others, so one codon less counts as equally long. */
static void put_coding_first(const uint8_t *codes, int32_t length, Room *room) {
    Stretch *sorted = room->sorted, best;
    int64_t n_longest = 0, index = 0;
    int32_t most = INT32_MIN;
    while (n_longest < room->n_found && sorted[n_longest].n_codons >= sorted[0].n_codons - 1)
        n_longest++;
    for (int64_t i = 0; n_longest > 1 && i < n_longest; i++) {
        int32_t sum = coding_sum(codes, length, sorted + i);
        if (sum > most) {
            most = sum;
            index = i;
        }
    }
    if (index == 0)
        return;
    best = sorted[index];
    memmove(sorted + 1, sorted, index * sizeof(Stretch));
    sorted[0] = best;
}

/* The bits of a 64-bit word from start to before end. */
static uint64_t bits_between(int32_t word, int32_t start, int32_t end) {
    uint64_t bits = ~UINT64_C(0);
    if (start > 64 * word)
        bits <<= start - 64 * word;
    if (end < 64 * word + 64)
        bits &= (UINT64_C(1) << (end - 64 * word)) - 1;
    return bits;
}

/* Keep the stretches that earlier ones hardly cover, in the order of their length. */
static void choose_stretches(Room *room, int32_t length) {
    clear(room->covered, (length / 64 + 1) * sizeof(uint64_t));
    room->n_kept = room->n_covered = 0;
    for (int64_t i = 0; i < room->n_found; i++) {
        const Stretch *stretch = room->sorted + i;
        int32_t start = stretch->first, end = start + 3 * stretch->n_codons, n_before = 0;
        for (int32_t word = start / 64; 64 * word < end; word++)
            n_before += n_bits_of(room->covered[word] & bits_between(word, start, end));
        if (n_before > MOST_COVERED * stretch->n_codons)
            continue;
        for (int32_t word = start / 64; 64 * word < end; word++)
            room->covered[word] |= bits_between(word, start, end);
        room->n_covered += end - start - n_before;
        room->kept[room->n_kept++] = *stretch;
    }
    for (int64_t i = 1; i < room->n_kept; i++) { /* the first one may be a codon too short */
        Stretch before = room->kept[i - 1];
        if (before.n_codons >= room->kept[i].n_codons)
            break;
        room->kept[i - 1] = room->kept[i];
        room->kept[i] = before;
    }
}

static void find_stretches(const Bases *bases, int64_t from, int32_t length, int32_t shortest,
                           Room *room) {
    clear(room->n_rows, sizeof room->n_rows);
    clear(room->n_stops, sizeof room->n_stops);
    clear(room->longest, sizeof room->longest);
    for (int strand = 0; strand < 2; strand++)
        find_in_strand(bases, strand, from, length, shortest, room);
    sort_stretches(room, shortest, first_strand_of(bases->digits + from, length));
    put_coding_first(bases->codes + from, length, room);
    choose_stretches(room, length);
}

/* Sort stretches by their first base; ties keep their order, the longest first. */
static void sort_by_place(Stretch *stretches, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        Stretch one = stretches[i];
        int64_t place = i;
        for (; place > 0 && stretches[place - 1].first > one.first; place--)
            stretches[place] = stretches[place - 1];
        stretches[place] = one;
    }
}

/* Words of residues */

static uint64_t hash_of(int64_t number) {
    const uint64_t multiplier = UINT64_C(0x9E3779B97F4A7C15); /* 2^64 over the golden ratio */
    uint64_t hash = (uint64_t)number * multiplier;
    hash ^= hash >> 32;
    hash *= multiplier;
    return hash ^ hash >> 32;
}

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
static int32_t first_entry(const Words *words, int64_t bucket) {
    int64_t group = bucket / GROUP;
    int n = (int)(bucket % GROUP);
    const uint8_t *counts = words->n_of_bucket + group * GROUP;
    uint64_t high = n > 8 ? first_bytes(counts + 8, n - 8) : 0;
    return words->first[group] + sum_of_bytes(first_bytes(counts, n), high);
}

/* One bit for each prefix that the entries of a bucket have; n entries can be read. */
static inline int beginnings(const uint16_t *entries, int count, int64_t n) {
    enum { SHIFT = REST_BITS + OWNER_BITS - HINT_BITS, FEW = 3 };
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

/* Prepare a table of words: fill the first entry of each group of buckets, and the hints. Count the
 * entries with an unknown owner. */
int open_words(const uint8_t *n_of_bucket, const uint16_t *entries, int64_t n, int32_t *first,
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
            here += (uint16_t)((entries[i] - 1) & ((1 << OWNER_BITS) - 1)) >= N_OWNERS - 1;
        *n_strange += here;
    }
    return 0;
}

/* The owner of a hash among the n entries of its bucket; 0: none. */
static uint8_t owner_among(const uint16_t *entries, int n, uint64_t hash) {
    int rest = rest_of(hash);
    for (int i = 0; i < n; i++) {
        if (entries[i] >> OWNER_BITS == rest)
            return entries[i] & ((1 << OWNER_BITS) - 1);
        if (entries[i] >> OWNER_BITS > rest)
            break;
    }
    return 0;
}

/* Index of the bit that is set if a word outside the sample has the same prefix. */
static uint64_t hint_of(uint64_t hash) { return hash >> (64 - BUCKET_BITS - HINT_BITS); }

/* Whether a word may have an owner. All of the sample may: most of its buckets are full. */
static int may_be_owned(const Words *words, uint64_t hash) {
    uint64_t hint = hint_of(hash);
    return is_in_sample(hash) | (words->hints[hint >> 3] >> (hint & 7) & 1);
}

/* The hash of a word; its hint is prefetched for the search that follows. */
static uint64_t hash_to_find(const Words *words, int64_t number) {
    uint64_t hash = hash_of(number);
    __builtin_prefetch(words->hints + (hint_of(hash) >> 3));
    return hash;
}

/* The owner of each hash. The steps prefetch for many hashes, so that waits for memory overlap. */
static void owners_of_hashes(const Words *words, const uint64_t *hashes, int64_t n,
                             uint8_t *owners) {
    enum { AT_ONCE = 128 };
    for (int64_t low = 0; low < n; low += AT_ONCE) {
        int64_t high = low + AT_ONCE < n ? low + AT_ONCE : n, waiting[AT_ONCE];
        int32_t first[AT_ONCE];
        int n_waiting = 0;
        for (int64_t i = low; i < high; i++) {
            owners[i] = 0;
            waiting[n_waiting] = i;
            n_waiting += may_be_owned(words, hashes[i]); /* no branch: it would be unpredictable */
        }
        for (int i = 0; i < n_waiting; i++) {
            int64_t bucket = bucket_of(hashes[waiting[i]]);
            __builtin_prefetch(words->n_of_bucket + bucket);
            __builtin_prefetch(words->first + bucket / GROUP);
        }
        for (int i = 0; i < n_waiting; i++) {
            first[i] = first_entry(words, bucket_of(hashes[waiting[i]]));
            __builtin_prefetch(words->entries + first[i]);
        }
        for (int i = 0; i < n_waiting; i++) {
            uint64_t hash = hashes[waiting[i]];
            owners[waiting[i]] = owner_among(words->entries + first[i],
                                             words->n_of_bucket[bucket_of(hash)], hash);
        }
    }
}

int owners_of(const int64_t *numbers, int64_t n, const uint8_t *hints, const uint8_t *n_of_bucket,
              const int32_t *first, const uint16_t *entries, int64_t n_entries, uint8_t *owners) {
    Words words = {hints, n_of_bucket, first, entries, n_entries};
    uint64_t *hashes = malloc((n + 1) * sizeof(uint64_t));
    if (!hashes)
        return -1;
    for (int64_t i = 0; i < n; i++)
        hashes[i] = hash_to_find(&words, numbers[i]);
    owners_of_hashes(&words, hashes, n, owners);
    free(hashes);
    return 0;
}

/* Features */

/* Logarithms of counts: n log n, log(n + 1/2) and log(n + 1). Those of small counts are kept. */
enum { TIMES_LOG, LOG_HALF, LOG_NEXT, N_LOGS, N_COUNTS = 4096 };

static double logs[N_LOGS][N_COUNTS];

static double new_log(int of, int64_t n) {
    return of == TIMES_LOG ? n * log(larger(1, n)) : of == LOG_HALF ? log(n + 0.5) : log1p(n);
}

static double log_of(int of, int64_t n) { return n < N_COUNTS ? logs[of][n] : new_log(of, n); }

__attribute__((constructor)) static void fill_logs(void) {
    for (int of = 0; of < N_LOGS; of++)
        for (int64_t n = 0; n < N_COUNTS; n++)
            logs[of][n] = new_log(of, n);
}

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
    int32_t owners[N_OWNERS];
    int64_t n_words;
    uint8_t *known;       /* owners of words, (n_digits, 2); the caller keeps them */
    int64_t n_unknown;    /* words to look up */
    uint64_t *hashes;     /* of the words to look up */
    uint8_t **at;         /* where to store their owners */
    uint8_t *found;       /* their owners; also used to mark palindromes */
    uint16_t *threes;     /* numbers of three residues */
    uint16_t *met[3];     /* junctions of both kinds, and pairs, in the order of the piece */
} Tally;

static void open_tables(Tables *tables, const Code *code) {
    for (int i = 0; i < N_CODES; i++)
        for (int strand = 0; strand < 2; strand++) {
            uint8_t counted = code->synonym[strand ? other_of(i) : i];
            int a = counted / 25, b = counted / 5 % 5, c = counted % 5;
            int is_known = a < UNKNOWN && b < UNKNOWN && c < UNKNOWN;
            tables->codes[strand][i] = counted;
            tables->numbers[strand][i] = is_known ? 16 * a + 4 * b + c : N_CODONS;
            tables->residues[strand][i] = code->residue[counted];
        }
    for (int number = 0; number < N_CODONS; number++) {
        uint8_t digits[3] = {number >> 4, number >> 2 & 3, number & 3};
        uint8_t codon = 25 * digits[0] + 5 * digits[1] + digits[2];
        tables->code_of_number[number] = codon;
        for (int i = 0; i < 3; i++)
            tables->n_gc[number] += digits[i] == 1 || digits[i] == 2;
        if (code->is_stop[codon])
            memcpy(tables->stops[tables->n_stops++], digits, 3);
    }
}

static void close_tally(Tally *tally) {
    free(tally->hashes);
    free(tally->at);
    free(tally->found);
    free(tally->threes);
    for (int i = 0; i < 3; i++)
        free(tally->met[i]);
}

static int open_tally(Tally *tally, int64_t longest) {
    /* codons of all stretches that are read, which may overlap; there are more than bases */
    size_t n = MOST_STRETCHES * (longest / 3 + 1);
    int is_short = 0;
    is_short |= !(tally->hashes = malloc(n * sizeof(uint64_t)));
    is_short |= !(tally->at = malloc(n * sizeof(uint8_t *)));
    is_short |= !(tally->found = malloc(n));
    is_short |= !(tally->threes = malloc(n * sizeof(uint16_t)));
    for (int i = 0; i < 3; i++)
        is_short |= !(tally->met[i] = malloc(n * sizeof(uint16_t)));
    return is_short ? -1 : 0;
}

static void count_stretch(const Tables *tables, const uint8_t *code, const Stretch *stretch,
                          int is_longest, Tally *tally) {
    int strand = stretch->strand;
    int64_t step = strand ? -3 : 3;
    const uint8_t *codes = tables->codes[strand], *numbers = tables->numbers[strand];
    const uint8_t *residues = tables->residues[strand];
    int left = N_CODONS, before = N_RESIDUES;
    for (int32_t i = 0; i < stretch->n_codons; i++, code += step) {
        int right = numbers[*code], residue = residues[*code];
        tally->long_codes[codes[*code]]++;
        if (left < N_CODONS && right < N_CODONS) {
            int two = (left & 15) * 16 + (right >> 2), one = (left & 3) * 64 + right;
            int n_two = ++tally->junctions[0][two], n_one = ++tally->junctions[1][one];
            tally->met[0][tally->n_junctions] = two;
            tally->met[1][tally->n_junctions++] = one;
            if (n_two > tally->most_junctions)
                tally->most_junctions = n_two;
            if (n_one > tally->most_junctions)
                tally->most_junctions = n_one;
        }
        if (is_longest && before < N_RESIDUES && residue < N_RESIDUES) {
            int n = ++tally->pairs[before * N_RESIDUES + residue];
            tally->met[2][tally->n_pairs++] = before * N_RESIDUES + residue;
            if (n > tally->most_pairs)
                tally->most_pairs = n;
        }
        left = right;
        before = residue;
    }
}

/* Count the words that another piece has looked up already, and list the others. */
static void find_words(const Bases *bases, const Tables *tables, const Words *words,
                       const uint8_t *code, const Stretch *stretch, Tally *tally) {
    enum { THREE = N_RESIDUES * N_RESIDUES * N_RESIDUES };
    int strand = stretch->strand, n_known = 0, first = 0, second = 0;
    int64_t step = strand ? -3 : 3, n_unknown = tally->n_unknown, n_words = 0;
    const uint8_t *residues = tables->residues[strand];
    uint8_t *owner = tally->known + 2 * (code - bases->codes) + strand;
    uint16_t *threes = tally->threes;
    for (int32_t i = 0; i < stretch->n_codons; i++, code += step, owner += 2 * step) {
        int third = residues[*code];
        threes[i] = (uint16_t)((first * N_RESIDUES + second) * N_RESIDUES + third);
        first = second;
        second = third;
        n_known = third < N_RESIDUES ? n_known + 1 : 0;
        if (n_known < WORD)
            continue;
        n_words++;
        if (*owner < N_OWNERS) {
            tally->owners[*owner]++;
            continue;
        }
        tally->at[n_unknown] = owner;
        tally->hashes[n_unknown++] =
            hash_to_find(words,
                         ((int64_t)threes[i - 6] * THREE + threes[i - 3]) * THREE + threes[i]);
    }
    tally->n_unknown = n_unknown;
    tally->n_words += n_words;
}

static void count_codons(const Bases *bases, const Tables *tables, const Words *words,
                         int64_t from, int32_t length, const Room *room, Tally *tally) {
    clear(tally->long_codes, sizeof tally->long_codes);
    clear(tally->longest_codes, sizeof tally->longest_codes);
    clear(tally->owners, sizeof tally->owners);
    tally->n_junctions = tally->most_junctions = tally->n_pairs = tally->most_pairs = 0;
    tally->n_words = tally->n_unknown = 0;
    for (int64_t rank = 0; rank < room->n_kept && rank < MOST_STRETCHES; rank++) {
        const Stretch *stretch = room->kept + rank;
        const uint8_t *code = bases->codes + from;
        code += stretch->strand ? length - 3 - stretch->start : stretch->start;
        if (rank && stretch->n_codons < LONG)
            break;
        count_stretch(tables, code, stretch, rank == 0, tally);
        if (words->n_entries)
            find_words(bases, tables, words, code, stretch, tally);
        if (rank == 0)
            memcpy(tally->longest_codes, tally->long_codes, sizeof tally->long_codes);
    }
    owners_of_hashes(words, tally->hashes, tally->n_unknown, tally->found);
    for (int64_t i = 0; i < tally->n_unknown; i++) {
        tally->owners[tally->found[i]]++;
        *tally->at[i] = tally->found[i];
    }
}

static void count_bases(const uint8_t *digits, int32_t length, Tally *tally) {
    enum { AT_ONCE = 240 }; /* counts of one byte do not overflow */
    clear(tally->bases, sizeof tally->bases);
    tally->twos = 0;
    for (int32_t low = 0; low < length; low += AT_ONCE) {
        int32_t high = low + AT_ONCE < length ? low + AT_ONCE : length;
        int32_t high_two = high < length ? high : length - 1;
        uint8_t a = 0, c = 0, g = 0, t = 0, twos = 0;
        for (int32_t i = low; i < high; i++) {
            a += digits[i] == 0;
            c += digits[i] == 1;
            g += digits[i] == 2;
            t += digits[i] == 3;
        }
        for (int32_t i = low; i < high_two; i++)
            twos += (uint8_t)(digits[i] + digits[i + 1]) == 3;
        tally->bases[0] += a;
        tally->bases[1] += c;
        tally->bases[2] += g;
        tally->bases[3] += t;
        tally->twos += twos;
    }
}

/* The lowest bits of up to eight bytes; the bit of the first byte is the lowest. */
static uint64_t bits_of_bytes(const uint8_t *bytes, int32_t n) {
    uint64_t eight = 0;
    memcpy(&eight, bytes, n); /* little-endian, as all our processors are */
    return eight * UINT64_C(0x0102040810204080) >> 56;
}

static void count_palindromes(const uint8_t *digits, int32_t length, uint8_t *is_four,
                              Tally *tally) {
    clear(tally->fours, sizeof tally->fours);
    tally->sixes = 0;
    for (int32_t i = 0; i < length - 3; i++)
        is_four[i] = ((uint8_t)(digits[i] + digits[i + 3]) == 3) &
                     ((uint8_t)(digits[i + 1] + digits[i + 2]) == 3);
    for (int32_t first = 0; first < length - 3; first += 64) {
        int32_t n = first + 64 < length - 3 ? 64 : length - 3 - first;
        uint64_t bits = 0;
        for (int32_t i = 0; i < n; i += 8)
            bits |= bits_of_bytes(is_four + first + i, i + 8 < n ? 8 : n - i) << i;
        for (; bits; bits &= bits - 1) {
            int32_t i = first + __builtin_ctzll(bits);
            tally->fours[4 * digits[i] + digits[i + 1]]++;
            if (i > 0 && i + 4 < length)
                tally->sixes += digits[i - 1] + digits[i + 4] == 3;
        }
    }
}

/* Entropy of tetranucleotides, each counted with its reverse complement. */
static double entropy_of(const uint8_t *tetra, int32_t length) {
    int32_t counts[4][N_TETRA + 1], i = 0;
    int64_t total = 0;
    double sum = 0;
    clear(counts, sizeof counts);
    for (; i < length - 6; i += 4)
        for (int j = 0; j < 4; j++)
            counts[j][tetra[i + j]]++;
    for (; i < length - 3; i++)
        counts[0][tetra[i]]++;
    for (int j = 0; j < N_TETRA; j++)
        counts[0][j] += counts[1][j] + counts[2][j] + counts[3][j];
    for (int j = 0; j < N_TETRA; j++) {
        total += counts[0][j];
        sum += log_of(TIMES_LOG, counts[0][j]);
    }
    total = at_least(1, total);
    return log(total) - sum / total;
}

/* Square roots of the shares 1 / total, 2 / total, ..., most / total. */
static void write_root_shares(int32_t most, int32_t total, float *roots) {
    for (int32_t n = 1; n <= most; n++)
        roots[n] = sqrtf((float)n / (float)total);
}

static void write_roots(const int32_t *counts, int32_t total, int32_t most, uint16_t *met,
                        int32_t n_met, float *roots, float *out) {
    write_root_shares(most, total, roots);
    for (int32_t i = 0; i < n_met; i++)
        out[met[i]] = roots[counts[met[i]]];
}

/* Codons as roots of shares, and as log ratios. roots has room for every count. */
static void write_codons(const Tables *tables, const int32_t *codes, float gc, float *roots,
                         float *out, float *ratios) {
    double share = gc < LEAST_GC ? LEAST_GC : gc > MOST_GC ? MOST_GC : gc;
    double strong = share / 2, weak = (1 - share) / 2, expected[4];
    int32_t total = 0, most = 0;
    for (int i = 0; i < N_CODONS; i++) {
        int32_t n = codes[tables->code_of_number[i]];
        total += n;
        most = n > most ? n : most;
    }
    expected[0] = log(weak * weak * weak * total + 0.5);
    expected[1] = log(strong * (weak * weak) * total + 0.5);
    expected[2] = log(strong * strong * weak * total + 0.5);
    expected[3] = log(strong * strong * strong * total + 0.5);
    roots[0] = 0;
    write_root_shares(most, total, roots);
    for (int i = 0; i < N_CODONS; i++) {
        int32_t n = codes[tables->code_of_number[i]];
        out[i] = roots[n];
        ratios[i] = (float)(log_of(LOG_HALF, n) - expected[tables->n_gc[i]]);
    }
}

static double log_beside(double n, double expected, double added) {
    return log((n + added) / (larger(0, expected) + added));
}

static void write_palindromes(const Tally *tally, float *out) {
    double n_bases = tally->bases[0] + tally->bases[1] + tally->bases[2] + tally->bases[3];
    double of_one = larger(1, n_bases);
    double weak = (tally->bases[0] / of_one + tally->bases[3] / of_one) / 2;
    double strong = (tally->bases[1] / of_one + tally->bases[2] / of_one) / 2;
    double pair[2] = {weak * weak, strong * strong}, expected[2][2];
    double chance = pair[0] + (pair[1] + pair[1] + pair[0]);
    int32_t n_fours = 0;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            expected[i][j] = log(larger(0, pair[i] * pair[j] * (n_bases - 3)) + 0.5);
    for (int word = 0; word < 16; word++) {
        int is_strong = word >> 2 == 1 || word >> 2 == 2;
        int is_next = (word & 3) == 1 || (word & 3) == 2;
        n_fours += tally->fours[word];
        out[word] = (float)(log_of(LOG_HALF, tally->fours[word]) - expected[is_strong][is_next]);
    }
    out[16] = (float)log_beside(n_fours, chance * chance * (n_bases - 3), 1);
    out[17] = (float)log_beside(tally->sixes, chance * chance * chance * (n_bases - 5), 1);
    out[18] = (float)log_beside(tally->twos, chance * (n_bases - 1), 1);
}

static void write_spelling(const Tally *tally, float *out) {
    double a = tally->bases[0], c = tally->bases[1], g = tally->bases[2], t = tally->bases[3];
    out[0] = (float)((c + g) / larger(1, a + c + g + t));
    out[1] = (float)(fabs(c - g) / larger(1, c + g));
    out[2] = (float)(fabs(a - t) / larger(1, a + t));
}

static void write_stretches(Room *room, double n_bases, float *out) {
    int32_t n_long = 0, n_reverse = 0, n_switches = 0;
    for (int i = 0; i < 3; i++)
        out[i] = i < room->n_kept ? (float)log_of(LOG_NEXT, room->kept[i].n_codons) : 0;
    out[3] = (float)((room->n_kept ? 3 * (double)room->kept[0].n_codons : 0) / n_bases);
    while (n_long < room->n_kept && room->kept[n_long].n_codons >= GENE_LIKE)
        n_long++;
    sort_by_place(room->kept, n_long);
    for (int32_t i = 0; i < n_long; i++) {
        n_reverse += room->kept[i].strand;
        n_switches += i && room->kept[i].strand != room->kept[i - 1].strand;
    }
    out[4] = (float)(1000 * (double)n_long / n_bases);
    out[5] = (float)(room->n_covered / n_bases);
    out[6] = (float)((double)n_switches / at_least(1, n_long - 1));
    out[7] = (float)((double)at_least(n_reverse, n_long - n_reverse) / at_least(1, n_long));
}

static void sort_six(int32_t *values) {
    for (int i = 1; i < 6; i++)
        for (int j = i; j > 0 && values[j - 1] > values[j]; j--) {
            int32_t value = values[j];
            values[j] = values[j - 1];
            values[j - 1] = value;
        }
}

/* The stops and the longest stretch of each frame, also compared with chance. */
static void write_frames(const Tables *tables, const Tally *tally, Room *room, double n_bases,
                         float *out) {
    double total = larger(1, (double)tally->bases[0] + tally->bases[1] + tally->bases[2] +
                                 tally->bases[3]);
    double shares[4], forward = 0, reverse = 0, chance, expected, by_chance;
    int32_t n_stops = 0;
    for (int i = 0; i < 4; i++)
        shares[i] = tally->bases[i] / total;
    for (int i = 0; i < tables->n_stops; i++) {
        const uint8_t *stop = tables->stops[i];
        forward += shares[stop[0]] * shares[stop[1]] * shares[stop[2]];
        reverse += shares[3 - stop[0]] * shares[3 - stop[1]] * shares[3 - stop[2]];
    }
    chance = (forward + reverse) / 2;
    expected = log(larger(2, 2 * n_bases * chance)) / larger(chance, 1e-4);
    by_chance = n_bases / 3 < expected ? n_bases / 3 : expected;
    sort_six(room->n_stops);
    sort_six(room->longest);
    for (int i = 0; i < 6; i++) {
        n_stops += room->n_stops[i];
        out[i] = (float)(3 * (double)room->n_stops[i] / n_bases);
        out[6 + i] = (float)log_of(LOG_NEXT, room->longest[5 - i]);
    }
    out[12] = (float)(2 * chance);
    out[13] = (float)(log_of(LOG_NEXT, room->longest[5]) - log1p(by_chance));
    out[14] = (float)(n_stops / (2 * n_bases) - chance);
}

/* GC, purines and A at each codon position of the longest stretch. */
static void write_positions(const Tally *tally, float *out) {
    int32_t counts[3][5];
    const int32_t *code = tally->longest_codes;
    clear(counts, sizeof counts);
    for (int first = 0; first < 5; first++)
        for (int second = 0; second < 5; second++)
            for (int third = 0; third < 5; third++, code++) {
                counts[0][first] += *code;
                counts[1][second] += *code;
                counts[2][third] += *code;
            }
    for (int i = 0; i < 3; i++) {
        double of[4] = {counts[i][0], counts[i][1], counts[i][2], counts[i][3]};
        double total = larger(1, of[0] + of[1] + of[2] + of[3]);
        out[i] = (float)(of[1] / total + of[2] / total);
        out[3 + i] = (float)(of[0] / total + of[2] / total);
        out[6 + i] = (float)(of[0] / total);
    }
}

static void write_owners(const Tally *tally, float *out) {
    double n_words = larger(1, (double)tally->n_words);
    for (int owner = 1; owner < N_OWNERS; owner++) {
        double n = tally->owners[owner];
        if (owner == ONE_VIRAL || owner == ONE_CELLULAR)
            n *= RARITY;
        out[owner - 1] = (float)sqrt(n / n_words);
    }
}

/* What it takes to read pieces. */
typedef struct {
    Bases bases;
    Tables tables;
    Words words;
    Room room;
    Tally tally;
    float *roots;
} Reader;

static void close_reader(Reader *reader) {
    close_tally(&reader->tally);
    close_room(&reader->room);
    free(reader->roots);
}

static int open_reader(Reader *reader, const Bases *bases, const int64_t *lengths, int64_t n,
                       const uint8_t *code_tables, const Words *words, uint8_t *owners) {
    Code code = {code_tables, code_tables + N_CODES, code_tables + 2 * N_CODES};
    int64_t longest = longest_of(lengths, n);
    int64_t most = MOST_STRETCHES * (longest / 3 + 1) + longest; /* no count exceeds it */
    reader->bases = *bases;
    reader->words = *words;
    reader->tally.known = owners;
    reader->roots = malloc((most + 1) * sizeof(float));
    open_tables(&reader->tables, &code);
    if (!reader->roots || open_room(&reader->room, longest) ||
        open_tally(&reader->tally, longest))
        return -1;
    return 0;
}

/* Compute the features of a piece. Returns 1 if it has no known base. */
static uint8_t read_piece(Reader *reader, int64_t from, int32_t length, float *out) {
    const Bases *bases = &reader->bases;
    const Tables *tables = &reader->tables;
    Room *room = &reader->room;
    Tally *tally = &reader->tally;
    float *roots = reader->roots;
    float *longest = out, *long_ones = out + N_CODONS, *junctions = out + 2 * N_CODONS;
    float *pairs = junctions + 2 * N_JUNCTIONS, *palindromes = pairs + N_PAIRS;
    float *figures = palindromes + N_PALINDROMES, *owners = figures + N_FIGURES;
    float *ratios = owners + N_OWNERS - 1;
    double n_bases = (double)at_least(1, length);
    find_stretches(bases, from, length, SHORTEST, room);
    count_codons(bases, tables, &reader->words, from, length, room, tally);
    count_bases(bases->digits + from, length, tally);
    count_palindromes(bases->digits + from, length, tally->found, tally);
    clear(junctions, (2 * N_JUNCTIONS + N_PAIRS) * sizeof(float));
    for (int kind = 0; kind < 2; kind++)
        write_roots(tally->junctions[kind], tally->n_junctions, tally->most_junctions,
                    tally->met[kind], tally->n_junctions, roots, junctions + kind * N_JUNCTIONS);
    write_roots(tally->pairs, tally->n_pairs, tally->most_pairs, tally->met[2], tally->n_pairs,
                roots, pairs);
    for (int32_t i = 0; i < tally->n_junctions; i++)
        tally->junctions[0][tally->met[0][i]] = tally->junctions[1][tally->met[1][i]] = 0;
    for (int32_t i = 0; i < tally->n_pairs; i++)
        tally->pairs[tally->met[2][i]] = 0;
    write_palindromes(tally, palindromes);
    write_spelling(tally, figures);
    write_stretches(room, n_bases, figures + 3);
    write_frames(tables, tally, room, n_bases, figures + 11);
    write_positions(tally, figures + 26);
    figures[35] = (float)entropy_of(bases->tetra + from, length);
    write_owners(tally, owners);
    write_codons(tables, tally->longest_codes, figures[0], roots, longest, ratios);
    write_codons(tables, tally->long_codes, figures[0], roots, long_ones, ratios + N_CODONS);
    return tally->bases[0] + tally->bases[1] + tally->bases[2] + tally->bases[3] == 0;
}

int piece_features(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                   const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                   const int64_t *starts, const int64_t *lengths, int64_t n,
                   const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                   const int32_t *first, const uint16_t *entries, int64_t n_entries,
                   uint8_t *owners, float *out, uint8_t *is_blank) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Words words = {hints, n_of_bucket, first, entries, n_entries};
    Reader reader = {0};
    int result = open_reader(&reader, &bases, lengths, n, code_tables, &words, owners);
    for (int64_t i = 0; result == 0 && i < n; i++)
        is_blank[i] = read_piece(&reader, starts[i], (int32_t)lengths[i], out + i * N_FEATURES);
    close_reader(&reader);
    return result;
}

/* The means of the first `width` features over the pieces of each row: (n_rows,) -> (n_rows,
 * width). A row has n_pieces consecutive pieces. NaN where no piece has a known base. */
int mean_features(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                  const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                  const int64_t *starts, const int64_t *lengths, int64_t n,
                  const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                  const int32_t *first, const uint16_t *entries, int64_t n_entries,
                  uint8_t *owners, const int64_t *n_pieces, int64_t n_rows, int64_t width,
                  double *means) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Words words = {hints, n_of_bucket, first, entries, n_entries};
    float features[N_FEATURES];
    Reader reader = {0};
    int result = open_reader(&reader, &bases, lengths, n, code_tables, &words, owners);
    for (int64_t row = 0, i = 0; result == 0 && row < n_rows; row++, means += width) {
        int64_t end = i + n_pieces[row], n_known = 0;
        clear(means, width * sizeof(double));
        for (; i < end; i++) {
            if (read_piece(&reader, starts[i], (int32_t)lengths[i], features))
                continue;
            n_known++;
            for (int64_t j = 0; j < width; j++)
                means[j] += nearest(features[j] * STEPS); /* whole: in any order the same sum */
        }
        for (int64_t j = 0; j < width; j++)
            means[j] = n_known ? means[j] / (STEPS * n_known) : NAN;
    }
    close_reader(&reader);
    return result;
}

/* Stretches by themselves */

/* The kept stretches of each piece, longest first: their number, and strand, start and number of
 * codons of each.
 *
 * The caller allocates one row per `shortest` + 1 codons of six frames. */
int kept_stretches(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                   const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                   const int64_t *starts, const int64_t *lengths, int64_t n, int64_t shortest,
                   int64_t *n_kept, int64_t *rows) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Room room = {0};
    int result = open_room(&room, longest_of(lengths, n));
    for (int64_t i = 0; result == 0 && i < n; i++) {
        find_stretches(&bases, starts[i], (int32_t)lengths[i], (int32_t)shortest, &room);
        n_kept[i] = room.n_kept;
        for (int64_t rank = 0; rank < room.n_kept; rank++) {
            *rows++ = room.kept[rank].strand;
            *rows++ = room.kept[rank].start;
            *rows++ = room.kept[rank].n_codons;
        }
    }
    close_room(&room);
    return result;
}

/* The layout of the gene-like stretches of a piece. */
static void write_layout(Room *room, double kilobases, double *out) {
    const Stretch *kept = room->kept;
    int64_t n = room->n_kept, n_genes = 0, n_reverse = 0, n_switches = 0, n_short = 0;
    double total = 0, squares = 0, of_genes = 0, gaps = 0;
    double middle = n ? kept[(n - 1) / 2].n_codons : 0, longest = n ? kept[0].n_codons : 0;
    int32_t strand = -1;
    sort_by_place(room->kept, n);
    for (int64_t i = 0; i < n; i++) {
        double n_codons = kept[i].n_codons;
        total += n_codons;
        squares += n_codons * n_codons;
        if (i) {
            double gap = kept[i].first - kept[i - 1].first - 3 * kept[i - 1].n_codons;
            gap = gap < LEAST_GAP ? LEAST_GAP : gap > MOST_GAP ? MOST_GAP : gap;
            n_short += fabs(gap) < ABUTTING;
            gaps += gap; /* whole numbers, as all sums here: in any order the same */
        }
        if (n_codons < GENE)
            continue;
        n_switches += strand >= 0 && strand != kept[i].strand;
        strand = kept[i].strand;
        n_genes++;
        n_reverse += strand;
        of_genes += 3 * n_codons;
    }
    out[0] = n / kilobases;
    out[1] = 3 * total / 1000 / kilobases;
    out[2] = log(larger(1, middle));
    out[3] = log(larger(1, total / larger(1e-9, (double)n)));
    out[4] = log(larger(1, longest));
    out[5] = log(larger(1, sqrt(squares / larger(1e-9, total))));
    out[6] = n_genes / kilobases;
    out[7] = of_genes / 1000 / kilobases;
    out[8] = n_switches / larger(1e-9, (double)n_genes - 1);
    out[9] = n_genes > 1 ? (double)at_least(n_reverse, n_genes - n_reverse) / n_genes : 0;
    out[10] = n_short / larger(1e-9, (double)n - 1);
    out[11] = gaps / 1000 / larger(1e-9, (double)n - 1);
}

int layout_features(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                    const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                    const int64_t *starts, const int64_t *lengths, int64_t n, double *out) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Room room = {0};
    int result = open_room(&room, longest_of(lengths, n));
    for (int64_t i = 0; result == 0 && i < n; i++) {
        find_stretches(&bases, starts[i], (int32_t)lengths[i], GENE_LIKE, &room);
        write_layout(&room, at_least(1, lengths[i]) / 1000.0, out + i * N_LAYOUT);
    }
    close_room(&room);
    return result;
}

/* Identify a virus: words of its family, terminal repeats, and reassigned stop codons */

/* The words of the long stretches of each piece: how many it has, and their numbers, by piece.
 *
 * The caller allocates one number per two bases of each piece. */
int stretch_words(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                  const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                  const int64_t *starts, const int64_t *lengths, int64_t n,
                  const uint8_t *residue_of, int64_t shortest, int64_t *n_words,
                  int64_t *numbers) {
    enum { THREE = N_RESIDUES * N_RESIDUES * N_RESIDUES };
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Room room = {0};
    int64_t longest = longest_of(lengths, n), *to = numbers;
    uint16_t *threes = malloc((longest / 3 + 1) * sizeof(uint16_t));
    uint8_t residues[2][N_CODES];
    int result = threes ? open_room(&room, longest) : -1;
    for (int code = 0; code < N_CODES; code++) {
        residues[0][code] = residue_of[code];
        residues[1][code] = residue_of[other_of(code)];
    }
    for (int64_t i = 0; result == 0 && i < n; i++) {
        const int64_t *first_word = to;
        find_stretches(&bases, starts[i], (int32_t)lengths[i], (int32_t)shortest, &room);
        for (int64_t rank = 0; rank < room.n_kept; rank++) {
            const Stretch *stretch = room.kept + rank;
            const uint8_t *code = bases.codes + starts[i];
            int64_t step = stretch->strand ? -3 : 3;
            int n_known = 0, first = 0, second = 0;
            code += stretch->strand ? lengths[i] - 3 - stretch->start : stretch->start;
            for (int32_t j = 0; j < stretch->n_codons; j++, code += step) {
                int third = residues[stretch->strand][*code];
                threes[j] = (uint16_t)((first * N_RESIDUES + second) * N_RESIDUES + third);
                first = second;
                second = third;
                n_known = third < N_RESIDUES ? n_known + 1 : 0;
                if (n_known >= WORD)
                    *to++ = ((int64_t)threes[j - 6] * THREE + threes[j - 3]) * THREE + threes[j];
            }
        }
        n_words[i] = to - first_word;
    }
    close_room(&room);
    free(threes);
    return result;
}

/* The owner of each word; -1 if the table does not have it. */
int families_of(const int64_t *numbers, int64_t n, const int32_t *first, const uint16_t *rests,
                const uint16_t *owners, int32_t *out) {
    enum { AT_ONCE = 64, BITS = 20, REST = 16 };
    const uint64_t factor = UINT64_C(0xD1B54A32D192ED03);
    for (int64_t low = 0; low < n; low += AT_ONCE) {
        int64_t n_here = n - low < AT_ONCE ? n - low : AT_ONCE;
        int32_t buckets[AT_ONCE];
        uint16_t rest[AT_ONCE];
        for (int64_t i = 0; i < n_here; i++) {
            uint64_t hash = (uint64_t)numbers[low + i] * factor;
            hash = (hash ^ hash >> 31) * factor;
            hash ^= hash >> 29;
            buckets[i] = (int32_t)(hash >> (64 - BITS));
            rest[i] = (uint16_t)(hash >> (64 - BITS - REST));
            __builtin_prefetch(first + buckets[i]);
        }
        for (int64_t i = 0; i < n_here; i++)
            __builtin_prefetch(rests + first[buckets[i]]);
        for (int64_t i = 0; i < n_here; i++) {
            int32_t place = first[buckets[i]], end = first[buckets[i] + 1];
            while (place < end && rests[place] < rest[i])
                place++;
            out[low + i] = place < end && rests[place] == rest[i] ? owners[place] : -1;
        }
    }
    return 0;
}

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

/* For each piece: the count of each known base, and the codons of its longest open stretch in any
 * frame under each genetic code: (n, 4), (n, n_codes).
 *
 * The stretch is 0 where the share of C and G exceeds most_gc.
 * stop_of, by codon: 0: no stop; 1 to 3: a stop on the forward strand; 4 to 6: on the reverse one.
 * is_end, by genetic code and these seven: whether it ends a stretch. */
int longest_open(const uint8_t *digits, const int64_t *starts, const int64_t *lengths, int64_t n,
                 const uint8_t *stop_of, const uint8_t *is_end, int64_t n_codes, double most_gc,
                 int64_t *counts, int64_t *longest) {
    enum { KINDS = 7 };
    int64_t(*last)[6] = malloc((n_codes + 1) * sizeof *last); /* place of the latest stop */
    if (!last)
        return -1;
    for (int64_t i = 0; i < n; i++, counts += 4, longest += n_codes) {
        const uint8_t *bases = digits + starts[i];
        int64_t of_base[UNKNOWN + 1] = {0};
        for (int64_t code = 0; code < n_codes; code++) {
            longest[code] = 0;
            for (int frame = 0; frame < 6; frame++)
                last[code][frame] = frame % 3 - 3;
        }
        for (int64_t place = 0; place < lengths[i]; place++)
            of_base[bases[place]]++;
        memcpy(counts, of_base, 4 * sizeof(int64_t));
        if ((double)(of_base[1] + of_base[2] - 1) > most_gc * (double)lengths[i])
            continue; /* one base is allowed: callers compare the share with another rounding */
        for (int64_t place = 0; place + 2 < lengths[i]; place++) {
            int stop = stop_of[25 * bases[place] + 5 * bases[place + 1] + bases[place + 2]];
            int frame = stop ? (int)(place % 3) + (stop > 3 ? 3 : 0) : 0;
            for (int64_t code = 0; stop && code < n_codes; code++) {
                if (!is_end[KINDS * code + stop])
                    continue;
                longest[code] = at_least(place - last[code][frame], longest[code]);
                last[code][frame] = place;
            }
        }
        for (int64_t code = 0; code < n_codes; code++) {
            for (int frame = 0; frame < 6; frame++)
                longest[code] = at_least(lengths[i] - last[code][frame], longest[code]);
            longest[code] = longest[code] / 3 - 1;
        }
    }
    free(last);
    return 0;
}

/* Proteins: concatenated residues; N_RESIDUES: no residue */

enum { N_CLASSES = 10, MOST_GAP_BETWEEN = 3, N_PATTERNS = 4, MOST_OF_PATTERN = 4 };

/* Offsets of the residues of each pattern; -1 after the last. */
static const int PATTERNS[N_PATTERNS][MOST_OF_PATTERN] = {
    {0, 1, 2, -1}, {0, 1, 2, 3}, {0, 1, 3, 4}, {0, 2, 3, 5}};

static void write_shares_of_all(const int32_t *counts, int n, float *out) {
    int32_t total = 0;
    for (int i = 0; i < n; i++)
        total += counts[i];
    for (int i = 0; i < n; i++)
        out[i] = sqrtf((float)counts[i] / (float)(total > 1 ? total : 1));
}

/* Roots of the shares of residues, of neighbouring pairs, and of pairs of classes with one to three
 * residues between them. */
int protein_composition(const uint8_t *residues, const int64_t *lengths, int64_t n,
                        const uint8_t *class_of, float *out) {
    for (int64_t protein = 0; protein < n; residues += lengths[protein++]) {
        int32_t single[N_RESIDUES] = {0}, pairs[N_PAIRS] = {0};
        int32_t apart[MOST_GAP_BETWEEN][N_CLASSES * N_CLASSES] = {{0}};
        for (int64_t i = 0; i < lengths[protein]; i++) {
            uint8_t residue = residues[i];
            if (residue >= N_RESIDUES)
                continue;
            single[residue]++;
            if (i && residues[i - 1] < N_RESIDUES)
                pairs[N_RESIDUES * residues[i - 1] + residue]++;
            for (int64_t gap = 1; gap <= MOST_GAP_BETWEEN && gap < i; gap++) {
                uint8_t before = residues[i - gap - 1];
                if (before < N_RESIDUES)
                    apart[gap - 1][N_CLASSES * class_of[before] + class_of[residue]]++;
            }
        }
        write_shares_of_all(single, N_RESIDUES, out);
        write_shares_of_all(pairs, N_PAIRS, out + N_RESIDUES);
        out += N_RESIDUES + N_PAIRS;
        for (int gap = 0; gap < MOST_GAP_BETWEEN; gap++, out += N_CLASSES * N_CLASSES)
            write_shares_of_all(apart[gap], N_CLASSES * N_CLASSES, out);
    }
    return 0;
}

/* Figures of the windows of each protein. A residue has two values, and a window their sums. For
 * each value: the largest and the smallest sum, 0 without a window. Then the number of windows with
 * a first sum above `least`, and the number of simple windows, which have few different residues.
 * (n_values, 2) -> (n, 6) */
int protein_windows(const uint8_t *residues, const int64_t *lengths, int64_t n,
                    const int64_t *values, int64_t size, int64_t least, int64_t size_of_simple,
                    int64_t few, int64_t *out) {
    for (int64_t protein = 0; protein < n; residues += lengths[protein++], out += 6) {
        int64_t sums[2] = {0}, n_of[N_RESIDUES + 1] = {0}, n_different = 0;
        clear(out, 6 * sizeof(int64_t));
        for (int64_t i = 0; i < lengths[protein]; i++) {
            n_different += n_of[residues[i]]++ == 0;
            if (i >= size_of_simple)
                n_different -= --n_of[residues[i - size_of_simple]] == 0;
            out[5] += i + 1 >= size_of_simple && n_different <= few;
            for (int value = 0; value < 2; value++) {
                sums[value] += values[2 * residues[i] + value];
                if (i >= size)
                    sums[value] -= values[2 * residues[i - size] + value];
                if (i + 1 == size || (i >= size && sums[value] > out[2 * value]))
                    out[2 * value] = sums[value];
                if (i + 1 == size || (i >= size && sums[value] < out[2 * value + 1]))
                    out[2 * value + 1] = sums[value];
            }
            out[4] += i + 1 >= size && sums[0] > least;
        }
    }
    return 0;
}

/* Roots of the shares of each owner among the words of a protein. */
static void write_owners_of_protein(const uint8_t *residues, int64_t length, const Words *words,
                                    uint64_t *hashes, uint8_t *owners, float *out) {
    int64_t number = 0, most = 1, n_known = 0, n_words = 0, counts[N_OWNERS] = {0};
    for (int i = 1; i < WORD; i++)
        most *= N_RESIDUES;
    for (int64_t i = 0; i < length; i++) {
        n_known = residues[i] < N_RESIDUES ? n_known + 1 : 0;
        number = n_known ? number % most * N_RESIDUES + residues[i] : 0;
        if (n_known >= WORD)
            hashes[n_words++] = hash_to_find(words, number);
    }
    owners_of_hashes(words, hashes, n_words, owners);
    for (int64_t i = 0; i < n_words; i++)
        counts[owners[i]]++;
    counts[ONE_VIRAL] *= RARITY;
    counts[ONE_CELLULAR] *= RARITY;
    for (int owner = 1; owner < N_OWNERS; owner++)
        out[owner - 1] = (float)sqrt((double)counts[owner] / (double)at_least(1, n_words));
}

/* Figures of the log ratios of a pattern in a protein: their mean, the mean of the positive ones
 * over all, and the root of the mean square. */
static void write_pattern(const uint8_t *residues, int64_t length, const int *places,
                          const int8_t *ratios, double step, float *out) {
    int64_t sum = 0, rises = 0, squares = 0, n = 0;
    int n_places = places[MOST_OF_PATTERN - 1] < 0 ? MOST_OF_PATTERN - 1 : MOST_OF_PATTERN;
    for (int64_t i = 0; i + places[n_places - 1] < length; i++) {
        int64_t number = 0, ratio;
        int is_known = 1;
        for (int place = 0; place < n_places; place++) {
            is_known &= residues[i + places[place]] < N_RESIDUES;
            number = N_RESIDUES * number + residues[i + places[place]];
        }
        if (!is_known)
            continue;
        ratio = ratios[number];
        sum += ratio;
        rises += ratio > 0 ? ratio : 0;
        squares += ratio * ratio;
        n++;
    }
    out[0] = (float)((double)sum / (double)at_least(1, n) * step);
    out[1] = (float)((double)rises / (double)at_least(1, n) * step);
    out[2] = (float)(sqrt((double)squares / (double)at_least(1, n)) * step);
}

/* What proteins share with viruses and cells: figures of words and of each pattern. (n, 18) */
int protein_shared(const uint8_t *residues, const int64_t *lengths, int64_t n,
                   const uint8_t *hints, const uint8_t *n_of_bucket, const int32_t *first,
                   const uint16_t *entries, int64_t n_entries, const int8_t *ratios_0,
                   const int8_t *ratios_1, const int8_t *ratios_2, const int8_t *ratios_3,
                   double step, float *out) {
    const int8_t *ratios[N_PATTERNS] = {ratios_0, ratios_1, ratios_2, ratios_3};
    Words words = {hints, n_of_bucket, first, entries, n_entries};
    int64_t longest = longest_of(lengths, n);
    uint64_t *hashes = malloc((longest + 1) * sizeof(uint64_t));
    uint8_t *owners = malloc(longest + 1);
    if (!hashes || !owners) {
        free(hashes);
        free(owners);
        return -1;
    }
    for (int64_t i = 0; i < n; residues += lengths[i++]) {
        write_owners_of_protein(residues, lengths[i], &words, hashes, owners, out);
        out += N_OWNERS - 1;
        for (int pattern = 0; pattern < N_PATTERNS; pattern++, out += 3)
            write_pattern(residues, lengths[i], PATTERNS[pattern], ratios[pattern], step, out);
    }
    free(hashes);
    free(owners);
    return 0;
}

/* Nets in whole numbers of eight bits: the order of a sum does not change it */

enum {
    OUTPUTS = 32,    /* outputs of a layer computed at once */
    INPUTS = 4,      /* inputs that an instruction multiplies at once */
    REALS = 16,      /* the same as OUTPUTS for a layer of float64 */
    ROWS = 8,        /* pieces computed at once: registers hold all sums */
    ROWS_READ = 96,  /* pieces kept at once as levels: a multiple of ROWS */
    MOST_WHOLES = 2, /* pieces that a part may lie in */
    MEAN_LEVEL = 128,
    /* of a net: first feature, inputs, two hidden sizes, kinds, viral kinds, whether it knows
     * prokaryotes and their viruses alone */
    N_SIZES = 7,
    LEAST_INNER = -256, MOST_INNER = 803 /* input of a GELU, in steps of 1/64; clipped */
};

static const double INNER_STEPS = 64, GELU_STEPS = 20; /* per unit: input, output */
static const double GELU_ZERO = 4;                     /* the level of 0; the minimum is -0.17 */

/* Multiply the levels of ROWS rows by the weights of OUTPUTS outputs, four inputs at a time. */
typedef void Multiply(const int8_t *weights, const uint8_t *levels, int64_t width,
                      int64_t n_fours, int32_t sums[ROWS][OUTPUTS]);

/* The same in float64; products are added in the order of the inputs. */
typedef void MultiplyReals(const double *weights, const double *values, int64_t width,
                           int64_t n_inputs, double sums[ROWS][REALS]);

/* Nets that read the same features. A layer has blocks of OUTPUTS outputs, padded with zeros. The
 * arrays concatenate the layers of each net, and the nets. */
typedef struct {
    const float *centre, *scale; /* of each feature: what MEAN_LEVEL means, and levels for 1 */
    int64_t n_features, n_nets;
    const int64_t *sizes;  /* (n_nets, N_SIZES) */
    /* of each block: (fours of inputs, OUTPUTS, INPUTS); two products with levels fit into 16 bits */
    const int8_t *weights;
    const int32_t *start;  /* of each sum: the bias, less what the level of 0 adds */
    const float *worth;    /* of one step of a sum; between layers in steps of GELU inputs */
} Nets;

/* Standardise features and round them to whole steps within the limits, half to even. */
typedef void WriteLevels(const Nets *nets, const float *restrict features,
                         uint8_t *restrict levels);

/* Apply the GELU to OUTPUTS sums; the results are levels. */
typedef void WriteGelus(const int32_t *restrict sums, const int32_t *restrict start,
                        const float *restrict worth, uint8_t *restrict levels);

typedef struct {
    Multiply *whole;
    MultiplyReals *reals;
    WriteLevels *levels;
    WriteGelus *gelus;
} Kernels;

static uint8_t gelu_levels[MOST_INNER - LEAST_INNER + 1];

/* Halves are rounded up, whatever the last bit of the tangent is. */
static const double HALF = 0.500001;

/* Tabulate the GELU, by its tanh formula (Hendrycks and Gimpel 2016, arXiv:1606.08415). */
static void fill_gelus(void) {
    for (int inner = LEAST_INNER; inner <= MOST_INNER; inner++) {
        double x = inner / INNER_STEPS;
        double gelu = x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        gelu_levels[inner - LEAST_INNER] = (uint8_t)(gelu * GELU_STEPS + GELU_ZERO + HALF);
    }
}

static const float ROUNDING = 12582912; /* 1.5 * 2^23: added to a number, it rounds it */

/* The nearest whole number within limits, in the last bits of a float32. */
static inline __attribute__((always_inline)) uint32_t bits_within(float value, float least,
                                                                  float most) {
    uint32_t bits;
    value = value > least ? value : least;
    value = (value < most ? value : most) + ROUNDING;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline __attribute__((always_inline)) void
find_levels(const Nets *nets, const float *restrict features, int64_t first,
            uint8_t *restrict levels) {
    const float *restrict centre = nets->centre, *restrict scale = nets->scale;
    for (int64_t i = first; i < nets->n_features; i++)
        levels[i] = (uint8_t)(bits_within((features[i] - centre[i]) * scale[i], -N_LEVELS,
                                          N_LEVELS) +
                              MEAN_LEVEL);
}

static inline __attribute__((always_inline)) void
find_gelus(const int32_t *restrict sums, const int32_t *restrict start,
           const float *restrict worth, uint8_t *restrict levels) {
    int32_t inner[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++)
        inner[i] = bits_within((float)(sums[i] + start[i]) * worth[i], LEAST_INNER, MOST_INNER) &
                   0xffff;
    for (int i = 0; i < OUTPUTS; i++)
        levels[i] = gelu_levels[(int16_t)inner[i] - LEAST_INNER];
}

static void gelus_plain(const int32_t *restrict sums, const int32_t *restrict start,
                        const float *restrict worth, uint8_t *restrict levels) {
    find_gelus(sums, start, worth, levels);
}

static void levels_plain(const Nets *nets, const float *restrict features,
                         uint8_t *restrict levels) {
    find_levels(nets, features, 0, levels);
}

static void multiply_plain(const int8_t *weights, const uint8_t *levels, int64_t width,
                           int64_t n_fours, int32_t sums[ROWS][OUTPUTS]) {
    clear(sums, ROWS * OUTPUTS * sizeof(int32_t));
    for (int64_t i = 0; i < n_fours; i++, weights += INPUTS * OUTPUTS, levels += INPUTS) {
        int16_t by_input[INPUTS][OUTPUTS]; /* lets compilers vectorise over outputs */
        for (int output = 0; output < OUTPUTS; output++)
            for (int input = 0; input < INPUTS; input++)
                by_input[input][output] = weights[INPUTS * output + input];
        for (int row = 0; row < ROWS; row++) {
            const uint8_t *level = levels + row * width;
            int16_t a = level[0], b = level[1], c = level[2], d = level[3];
            for (int output = 0; output < OUTPUTS; output++) {
                int16_t low = (int16_t)(by_input[0][output] * a + by_input[1][output] * b);
                int16_t high = (int16_t)(by_input[2][output] * c + by_input[3][output] * d);
                sums[row][output] += low + high;
            }
        }
    }
}

static void reals_plain(const double *weights, const double *values, int64_t width,
                        int64_t n_inputs, double sums[ROWS][REALS]) {
    clear(sums, ROWS * REALS * sizeof(double));
    for (int64_t i = 0; i < n_inputs; i++, weights += REALS)
        for (int row = 0; row < ROWS; row++)
            for (int output = 0; output < REALS; output++)
#ifdef FP_FAST_FMA
                sums[row][output] = fma(values[row * width + i], weights[output],
                                        sums[row][output]);
#else
                sums[row][output] += values[row * width + i] * weights[output];
#endif
}

#if defined(__x86_64__) && !defined(PORTABLE)
#include <cpuid.h>
#include <immintrin.h>

static int32_t four_at(const uint8_t *levels) {
    int32_t four;
    memcpy(&four, levels, sizeof four);
    return four;
}

/* The sums of each row are named variables: compilers would keep an array of them in memory. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define CLEAR_SUMS(ROW) __m512i low##ROW = _mm512_setzero_si512(), high##ROW = low##ROW;
#define ADD_PRODUCTS(ROW)                                                                        \
    four = _mm512_set1_epi32(four_at(levels + ROW * width));                                     \
    low##ROW = _mm512_dpbusd_epi32(low##ROW, four, first);                                       \
    high##ROW = _mm512_dpbusd_epi32(high##ROW, four, second);
#define STORE_SUMS(ROW)                                                                          \
    _mm512_storeu_si512(sums[ROW], low##ROW);                                                    \
    _mm512_storeu_si512(sums[ROW] + OUTPUTS / 2, high##ROW);

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void
multiply_vnni(const int8_t *weights, const uint8_t *levels, int64_t width, int64_t n_fours,
              int32_t sums[ROWS][OUTPUTS]) {
    EACH_ROW(CLEAR_SUMS)
    for (int64_t i = 0; i < n_fours; i++, weights += INPUTS * OUTPUTS, levels += INPUTS) {
        __m512i first = _mm512_loadu_si512(weights), four;
        __m512i second = _mm512_loadu_si512(weights + INPUTS * OUTPUTS / 2);
        EACH_ROW(ADD_PRODUCTS)
    }
    EACH_ROW(STORE_SUMS)
}

#define CLEAR_REALS(ROW) __m512d low##ROW = _mm512_setzero_pd(), high##ROW = low##ROW;
#define ADD_REALS(ROW)                                                                           \
    value = _mm512_set1_pd(values[ROW * width]);                                                 \
    low##ROW = _mm512_fmadd_pd(first, value, low##ROW);                                          \
    high##ROW = _mm512_fmadd_pd(second, value, high##ROW);
#define STORE_REALS(ROW)                                                                         \
    _mm512_storeu_pd(sums[ROW], low##ROW);                                                       \
    _mm512_storeu_pd(sums[ROW] + REALS / 2, high##ROW);

__attribute__((target("avx512f"))) static void reals_avx512(const double *weights,
                                                            const double *values, int64_t width,
                                                            int64_t n_inputs,
                                                            double sums[ROWS][REALS]) {
    EACH_ROW(CLEAR_REALS)
    for (int64_t i = 0; i < n_inputs; i++, weights += REALS, values++) {
        __m512d first = _mm512_loadu_pd(weights), value;
        __m512d second = _mm512_loadu_pd(weights + REALS / 2);
        EACH_ROW(ADD_REALS)
    }
    EACH_ROW(STORE_REALS)
}

__attribute__((target("avx2,fma"))) static void reals_fma(const double *weights,
                                                          const double *values, int64_t width,
                                                          int64_t n_inputs,
                                                          double sums[ROWS][REALS]) {
    enum { AT_ONCE = 4 };
    for (int first = 0; first < ROWS; first += AT_ONCE)
        for (int output = 0; output < REALS; output += 8) {
            const double *weight = weights + output, *value = values + first * width;
            __m256d low[AT_ONCE], high[AT_ONCE];
            for (int row = 0; row < AT_ONCE; row++)
                low[row] = high[row] = _mm256_setzero_pd();
            for (int64_t i = 0; i < n_inputs; i++, weight += REALS, value++) {
                __m256d left = _mm256_loadu_pd(weight), right = _mm256_loadu_pd(weight + 4);
                for (int row = 0; row < AT_ONCE; row++) {
                    __m256d of_row = _mm256_set1_pd(value[row * width]);
                    low[row] = _mm256_fmadd_pd(left, of_row, low[row]);
                    high[row] = _mm256_fmadd_pd(right, of_row, high[row]);
                }
            }
            for (int row = 0; row < AT_ONCE; row++) {
                _mm256_storeu_pd(sums[first + row] + output, low[row]);
                _mm256_storeu_pd(sums[first + row] + output + 4, high[row]);
            }
        }
}

__attribute__((target("avx2"))) static void levels_avx2(const Nets *nets,
                                                        const float *restrict features,
                                                        uint8_t *restrict levels) {
    enum { EIGHT = 8, AT_ONCE = 4 * EIGHT };
    const __m256 least = _mm256_set1_ps(-N_LEVELS), most = _mm256_set1_ps(N_LEVELS);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i middle = _mm256_set1_epi8((char)MEAN_LEVEL);
    int64_t first = 0;
    for (; first + AT_ONCE <= nets->n_features; first += AT_ONCE) {
        __m256i whole[4];
        for (int i = 0; i < 4; i++) {
            int64_t at = first + EIGHT * i;
            __m256 value = _mm256_sub_ps(_mm256_loadu_ps(features + at),
                                         _mm256_loadu_ps(nets->centre + at));
            value = _mm256_mul_ps(value, _mm256_loadu_ps(nets->scale + at));
            value = _mm256_min_ps(_mm256_max_ps(value, least), most);
            whole[i] = _mm256_cvtps_epi32(value); /* half to even, the default rounding */
        }
        whole[0] = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                      _mm256_packs_epi32(whole[2], whole[3]));
        whole[0] = _mm256_permutevar8x32_epi32(whole[0], order);
        _mm256_storeu_si256((__m256i *)(levels + first), _mm256_add_epi8(whole[0], middle));
    }
    find_levels(nets, features, first, levels);
}

__attribute__((target("avx2"))) static void gelus_avx2(const int32_t *restrict sums,
                                                       const int32_t *restrict start,
                                                       const float *restrict worth,
                                                       uint8_t *restrict levels) {
    find_gelus(sums, start, worth, levels);
}

__attribute__((target("avx2"))) static void multiply_avx2(const int8_t *weights,
                                                          const uint8_t *levels, int64_t width,
                                                          int64_t n_fours,
                                                          int32_t sums[ROWS][OUTPUTS]) {
    enum { AT_ONCE = 4, EIGHT = 8 };
    const __m256i ones = _mm256_set1_epi16(1);
    for (int first = 0; first < ROWS; first += AT_ONCE)
        for (int output = 0; output < OUTPUTS; output += 2 * EIGHT) {
            const int8_t *weight = weights + INPUTS * output;
            const uint8_t *level = levels + first * width;
            __m256i low[AT_ONCE], high[AT_ONCE];
            for (int row = 0; row < AT_ONCE; row++)
                low[row] = high[row] = _mm256_setzero_si256();
            for (int64_t i = 0; i < n_fours; i++, weight += INPUTS * OUTPUTS, level += INPUTS) {
                __m256i left = _mm256_loadu_si256((const __m256i *)weight);
                __m256i right = _mm256_loadu_si256((const __m256i *)(weight + INPUTS * EIGHT));
                for (int row = 0; row < AT_ONCE; row++) {
                    __m256i four = _mm256_set1_epi32(four_at(level + row * width));
                    __m256i of_left = _mm256_maddubs_epi16(four, left);
                    __m256i of_right = _mm256_maddubs_epi16(four, right);
                    low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(of_left, ones));
                    high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(of_right, ones));
                }
            }
            for (int row = 0; row < AT_ONCE; row++) {
                int32_t *to = sums[first + row] + output;
                _mm256_storeu_si256((__m256i *)to, low[row]);
                _mm256_storeu_si256((__m256i *)(to + EIGHT), high[row]);
            }
        }
}

/* The fastest kernels that the processor and the operating system support. */
static Kernels fastest(void) {
    Kernels of_machine = {multiply_plain, reals_plain, levels_plain, gelus_plain};
    unsigned a, b, c, d, of_one, kept, high;
    if (!__get_cpuid(1, &a, &b, &of_one, &d) || !(of_one & bit_OSXSAVE))
        return of_machine;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if ((kept & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return of_machine;
    of_machine.whole = multiply_avx2;
    of_machine.levels = levels_avx2;
    of_machine.gelus = gelus_avx2;
    if (of_one & bit_FMA)
        of_machine.reals = reals_fma;
    if ((kept & 0xe6) != 0xe6 || !(b & bit_AVX512F))
        return of_machine;
    of_machine.reals = reals_avx512;
    if ((b & bit_AVX512BW) && (c & bit_AVX512VNNI))
        of_machine.whole = multiply_vnni;
    return of_machine;
}
#else
static Kernels fastest(void) {
    Kernels of_machine = {multiply_plain, reals_plain, levels_plain, gelus_plain};
    return of_machine;
}
#endif

/* The kernels of this machine, chosen once: CPUID is slow on a virtual machine. */
static Kernels kernels;

__attribute__((constructor)) static void choose_kernels(void) {
    kernels = fastest();
    fill_gelus();
}

static int64_t blocks_of(int64_t n_outputs) { return (n_outputs + OUTPUTS - 1) / OUTPUTS; }

static int64_t fours_of(int64_t n_inputs) { return (n_inputs + INPUTS - 1) / INPUTS; }

/* The width of a row of levels: padding completes the last four inputs, with weights of 0. */
static int64_t width_of(const Nets *nets) { return nets->n_features + INPUTS - 1; }

/* Working memory: the levels of features and of both hidden layers of ROWS_READ pieces, and the
 * logits of a net for ROWS of them. */
typedef struct {
    uint8_t *levels, *hidden[2];
    double *logits;
} Desk;

static void close_desk(Desk *desk) {
    free(desk->levels);
    free(desk->hidden[0]);
    free(desk->hidden[1]);
    free(desk->logits);
}

static int open_desk(Desk *desk, const Nets *nets) {
    int64_t most[3] = {0, 0, 0};
    for (int64_t net = 0; net < nets->n_nets; net++)
        for (int layer = 0; layer < 3; layer++)
            most[layer] = at_least(most[layer],
                                   blocks_of(nets->sizes[net * N_SIZES + 2 + layer]) * OUTPUTS);
    desk->levels = calloc(ROWS_READ * width_of(nets), 1);
    desk->hidden[0] = calloc(ROWS_READ * most[0] + 1, 1);
    desk->hidden[1] = calloc(ROWS_READ * most[1] + 1, 1);
    desk->logits = calloc(ROWS * most[2] + 1, sizeof(double));
    return desk->levels && desk->hidden[0] && desk->hidden[1] && desk->logits ? 0 : -1;
}

/* A layer of a net. */
typedef struct {
    const int8_t *weights;
    const int32_t *start;
    const float *worth;
    int64_t n_inputs, n_outputs;
} Layer;

/* The next layer. */
static Layer behind(const Layer *layer, int64_t n_inputs, int64_t n_outputs) {
    int64_t n = blocks_of(layer->n_outputs) * OUTPUTS;
    Layer next = {layer->weights + n * INPUTS * fours_of(layer->n_inputs), layer->start + n,
                  layer->worth + n, n_inputs, n_outputs};
    return next;
}

/* The levels of a hidden layer: (n_rows, width) -> (n_rows, blocks of OUTPUTS). */
static void write_hidden(const Layer *layer, const uint8_t *levels, int64_t width, int64_t n_rows,
                         uint8_t *out) {
    int64_t n_fours = fours_of(layer->n_inputs), n_out = blocks_of(layer->n_outputs) * OUTPUTS;
    int32_t sums[ROWS][OUTPUTS];
    for (int64_t low = 0; low < n_out; low += OUTPUTS)
        for (int64_t first = 0; first < n_rows; first += ROWS) {
            kernels.whole(layer->weights + low * INPUTS * n_fours, levels + first * width, width,
                          n_fours, sums);
            for (int64_t row = 0; row < ROWS; row++)
                kernels.gelus(sums[row], layer->start + low, layer->worth + low,
                              out + (first + row) * n_out + low);
        }
}

/* The logits of ROWS rows: (ROWS, width) -> (ROWS, blocks of OUTPUTS). */
static void write_logits(const Layer *layer, const uint8_t *levels, int64_t width, double *out) {
    int64_t n_fours = fours_of(layer->n_inputs), n_out = blocks_of(layer->n_outputs) * OUTPUTS;
    int32_t sums[ROWS][OUTPUTS];
    for (int64_t low = 0; low < n_out; low += OUTPUTS) {
        kernels.whole(layer->weights + low * INPUTS * n_fours, levels, width, n_fours, sums);
        for (int64_t row = 0; row < ROWS; row++)
            for (int64_t i = 0; i < OUTPUTS; i++)
                out[row * n_out + low + i] =
                    (double)(sums[row][i] + layer->start[low + i]) * layer->worth[low + i];
    }
}

/* log(exp(a) + exp(b) + ...) */
static double log_sum_of(const double *values, int64_t n) {
    double largest = values[0], sum = 0;
    for (int64_t i = 1; i < n; i++)
        largest = larger(largest, values[i]);
    for (int64_t i = 0; i < n; i++)
        sum += exp(values[i] - largest);
    return largest + log(sum);
}

/* Read the rows on the desk by the net behind a layer, and return its last layer. Its log-odds of
 * the viral kinds, which come first, against all others are added to the sums. A net that knows
 * several kinds also adds the probability of the first viral and the first cellular kind. */
static Layer read_net(const Nets *nets, const Desk *desk, Layer layer, const int64_t *size,
                      int64_t n_rows, double *sums, double *shares) {
    int64_t n_kinds = size[4], n_viral = size[5], n_out = blocks_of(n_kinds) * OUTPUTS;
    int64_t width = blocks_of(size[3]) * OUTPUTS;
    layer = behind(&layer, size[1], size[2]);
    write_hidden(&layer, desk->levels + size[0], width_of(nets), n_rows, desk->hidden[0]);
    layer = behind(&layer, size[2], size[3]);
    write_hidden(&layer, desk->hidden[0], blocks_of(size[2]) * OUTPUTS, n_rows, desk->hidden[1]);
    layer = behind(&layer, size[3], n_kinds);
    for (int64_t first = 0; first < n_rows; first += ROWS) {
        write_logits(&layer, desk->hidden[1] + first * width, width, desk->logits);
        for (int64_t row = 0; row < ROWS && first + row < n_rows; row++) {
            const double *logits = desk->logits + row * n_out;
            double both[2] = {log_sum_of(logits, n_viral),
                              log_sum_of(logits + n_viral, n_kinds - n_viral)};
            sums[first + row] += both[0] - both[1];
            if (n_kinds > 2) {
                double all = log_sum_of(both, 2);
                shares[first + row] += exp(logits[0] - all) + exp(logits[n_viral] - all);
            }
        }
    }
    return layer;
}

/* The mean log-odds over nets, for each row on the desk, at most ROWS_READ. Nets that know
 * prokaryotes and their viruses alone, as two kinds, move the mean of the others half of the way to
 * theirs, times the probability, by the others, that the row is one of these. */
static void write_log_odds(const Nets *nets, const Desk *desk, int64_t n_rows, double *log_odds) {
    double special[ROWS_READ] = {0}, shares[ROWS_READ] = {0};
    int64_t n_special = 0, n_with_kinds = 0;
    Layer layer = {nets->weights, nets->start, nets->worth, 0, 0};
    clear(log_odds, n_rows * sizeof(double));
    for (int64_t net = 0; net < nets->n_nets; net++) {
        const int64_t *size = nets->sizes + net * N_SIZES;
        int is_special = size[6] != 0;
        layer = read_net(nets, desk, layer, size, n_rows, is_special ? special : log_odds, shares);
        n_special += is_special;
        n_with_kinds += size[4] > 2;
    }
    for (int64_t row = 0; row < n_rows; row++) {
        log_odds[row] /= nets->n_nets - n_special;
        if (n_special)
            log_odds[row] += shares[row] / at_least(1, n_with_kinds) *
                             (special[row] / n_special - log_odds[row]) / 2;
    }
}

/* The log-odds by all nets: (n, n_features) -> (n,). */
int net_log_odds(const float *features, int64_t n, const float *centre, const float *scale,
                 int64_t n_features, int64_t n_nets, const int64_t *sizes, const int8_t *weights,
                 const int32_t *start, const float *worth, double *log_odds) {
    Nets nets = {centre, scale, n_features, n_nets, sizes, weights, start, worth};
    Desk desk = {0};
    int result = open_desk(&desk, &nets);
    for (int64_t low = 0; result == 0 && low < n; low += ROWS_READ) {
        int64_t n_rows = n - low < ROWS_READ ? n - low : ROWS_READ;
        for (int64_t row = 0; row < n_rows; row++)
            kernels.levels(&nets, features + (low + row) * n_features,
                           desk.levels + row * width_of(&nets));
        write_log_odds(&nets, &desk, n_rows, log_odds + low);
    }
    close_desk(&desk);
    return result;
}

/* The features of a piece that was read in parts: means over the parts, with the layout before the
 * ratios. */
static void write_whole(const double *total, int64_t n_parts, const double *layout, float *out) {
    enum { BEFORE = N_FEATURES - 2 * N_CODONS };
    const double steps = STEPS * at_least(1, n_parts);
    for (int i = 0; i < BEFORE; i++)
        out[i] = (float)(total[i] / steps);
    for (int i = 0; i < N_LAYOUT; i++)
        out[BEFORE + i] = (float)layout[i];
    for (int i = BEFORE; i < N_FEATURES; i++)
        out[N_LAYOUT + i] = (float)(total[i] / steps);
}

/* The log-odds by all nets for some of the pieces that were read in parts: (n,) -> (n,). */
int whole_log_odds(const double *totals, const int64_t *n_parts, const double *layout,
                   const int64_t *rows, int64_t n, const float *centre, const float *scale,
                   int64_t n_features, int64_t n_nets, const int64_t *sizes,
                   const int8_t *weights, const int32_t *start, const float *worth,
                   double *log_odds) {
    float *features = malloc((n * (N_FEATURES + N_LAYOUT) + 1) * sizeof(float));
    int result = -1;
    if (!features)
        return result;
    for (int64_t i = 0; i < n; i++)
        write_whole(totals + rows[i] * N_FEATURES, n_parts[rows[i]], layout + rows[i] * N_LAYOUT,
                    features + i * (N_FEATURES + N_LAYOUT));
    result = net_log_odds(features, n, centre, scale, n_features, n_nets, sizes, weights, start,
                          worth, log_odds);
    free(features);
    return result;
}

/* Apply a linear layer in float64: (n, n_inputs) -> (n, n_outputs). The weights are in blocks of
 * REALS outputs: (n_inputs, REALS). */
int linear_layer(const double *values, int64_t n, int64_t n_inputs, int64_t n_outputs,
                 const double *weights, const double *bias, double *out) {
    double *inputs = calloc(ROWS * n_inputs + 1, sizeof(double)), sums[ROWS][REALS];
    if (!inputs)
        return -1;
    for (int64_t first = 0; first < n; first += ROWS) {
        int64_t n_rows = n - first < ROWS ? n - first : ROWS;
        memcpy(inputs, values + first * n_inputs, n_rows * n_inputs * sizeof(double));
        for (int64_t low = 0; low < n_outputs; low += REALS) {
            int64_t n_here = n_outputs - low < REALS ? n_outputs - low : REALS;
            kernels.reals(weights + low * n_inputs, inputs, n_inputs, n_inputs, sums);
            for (int64_t row = 0; row < n_rows; row++)
                for (int64_t i = 0; i < n_here; i++)
                    out[(first + row) * n_outputs + low + i] = sums[row][i] + bias[low + i];
        }
    }
    free(inputs);
    return 0;
}

/* Add the features of a part, in whole steps, to the totals of the pieces it lies in. */
static void add_part(const float *features, const int64_t *rows, double *totals,
                     int64_t *n_parts) {
    for (int i = 0; i < MOST_WHOLES; i++) {
        double *restrict total = totals + rows[i] * N_FEATURES;
        if (rows[i] < 0)
            continue;
        for (int64_t j = 0; j < N_FEATURES; j++)
            total[j] += nearest(features[j] * STEPS); /* whole: any order gives the same sum */
        n_parts[rows[i]]++;
    }
}

/* Read pieces: their mean log-odds over nets, NaN if all bases are unknown, and chosen features.
 *
 * The features of a piece with a known base are added to the rows of `totals` that `rows` names,
 * (n, MOST_WHOLES); -1: none. The owners of words, (n_digits, 2), are kept for other pieces. */
int piece_log_odds(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                   const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                   const int64_t *starts, const int64_t *lengths, int64_t n,
                   const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                   const int32_t *first, const uint16_t *entries, int64_t n_entries,
                   uint8_t *owners, const float *centre, const float *scale, int64_t n_features,
                   int64_t n_nets, const int64_t *sizes,
                   const int8_t *weights, const int32_t *start, const float *worth,
                   double *log_odds, const int64_t *chosen, int64_t n_chosen, float *figures,
                   const int64_t *rows, double *totals, int64_t *n_parts) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Words words = {hints, n_of_bucket, first, entries, n_entries};
    Nets nets = {centre, scale, n_features, n_nets, sizes, weights, start, worth};
    uint8_t is_blank[ROWS_READ];
    float features[N_FEATURES];
    Reader reader = {0};
    Desk desk = {0};
    int result = open_reader(&reader, &bases, lengths, n, code_tables, &words, owners);
    if (open_desk(&desk, &nets))
        result = -1;
    for (int64_t i = 0; result == 0 && i < n; i++) {
        int64_t row = i % ROWS_READ;
        is_blank[row] = read_piece(&reader, starts[i], (int32_t)lengths[i], features);
        for (int64_t j = 0; j < n_chosen; j++)
            figures[i * n_chosen + j] = features[chosen[j]];
        if (!is_blank[row])
            add_part(features, rows + i * MOST_WHOLES, totals, n_parts);
        kernels.levels(&nets, features, desk.levels + row * width_of(&nets));
        if (row < ROWS_READ - 1 && i < n - 1)
            continue;
        write_log_odds(&nets, &desk, row + 1, log_odds + i - row);
        for (int64_t j = 0; j <= row; j++)
            if (is_blank[j])
                log_odds[i - row + j] = NAN;
    }
    close_desk(&desk);
    close_reader(&reader);
    return result;
}

/* Regions: figures of pieces, the Markov chain of host and virus, and repeats */

typedef struct {
    double x, y;
    int64_t place;
} Point;

static int compare(double a, double b) { return (a > b) - (a < b); }

static int by_value(const void *a, const void *b) {
    return compare(*(const double *)a, *(const double *)b);
}

static int by_x(const void *a, const void *b) {
    const Point *one = a, *other = b;
    int order = compare(one->x, other->x);
    return order ? order : (one->place > other->place) - (one->place < other->place);
}

/* The median; sorts the values. */
static double median_of(double *values, int64_t n) {
    qsort(values, n, sizeof *values, by_value);
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/* The slope of y over x, fitted to the medians of equal parts by x; 0 if x does not vary. values
 * has room for n. */
static double slope_of(Point *points, int64_t n, double *values) {
    double x[N_PARTS], y[N_PARTS], mean_x = 0, mean_y = 0, squares = 0, products = 0;
    int64_t first = 0, n_parts = n < N_PARTS ? n : N_PARTS;
    qsort(points, n, sizeof *points, by_x);
    for (int64_t part = 0; part < n_parts; part++) {
        int64_t n_of_part = n / N_PARTS + (part < n % N_PARTS);
        const Point *of_part = points + first;
        for (int64_t i = 0; i < n_of_part; i++)
            values[i] = of_part[i].y;
        x[part] = (of_part[(n_of_part - 1) / 2].x + of_part[n_of_part / 2].x) / 2;
        y[part] = median_of(values, n_of_part);
        mean_x += x[part] / (double)n_parts;
        mean_y += y[part] / (double)n_parts;
        first += n_of_part;
    }
    for (int64_t part = 0; part < n_parts; part++) {
        squares += (x[part] - mean_x) * (x[part] - mean_x);
        products += (x[part] - mean_x) * (y[part] - mean_y);
    }
    /* ordered by x; without this, the rounding of the mean of equal x would give a slope */
    return x[n_parts - 1] > x[0] ? products / squares : 0;
}

/* Figures of a host, from its pieces with log-odds: median GC, the slope of log-odds over GC, and
 * the median of each figure of shape. (n,), (n,), (n, 3) -> (5,) */
int host_figures(const double *log_odds, const double *gc, const double *shape, int64_t n,
                 double *figures) {
    double *values = malloc((n + 1) * sizeof(double));
    Point *points = malloc((n + 1) * sizeof(Point));
    int result = values && points ? 0 : -1;
    int64_t n_known = 0;
    for (int64_t i = 0; result == 0 && i < n; i++)
        if (!isnan(log_odds[i]))
            points[n_known++] = (Point){gc[i], log_odds[i], i};
    if (n_known) {
        figures[1] = slope_of(points, n_known, values);
        for (int kind = -1; kind < N_SHAPE; kind++) {
            for (int64_t i = 0; i < n_known; i++)
                values[i] = kind < 0 ? points[i].x : shape[N_SHAPE * points[i].place + kind];
            figures[kind < 0 ? 0 : 2 + kind] = median_of(values, n_known);
        }
    }
    free(values);
    free(points);
    return result;
}

/* Log-odds at the GC of the host, plus the mean shape of n_around pieces, for each of n pieces.
 * host: its GC, the slope to subtract, and its shape and deviation, three figures each. */
int piece_signal(const double *log_odds, const double *gc, const double *shape, int64_t n,
                 const double *host, int64_t n_around, double weight, double *out) {
    const double *usual = host + 2, *deviation = usual + N_SHAPE;
    double *sums = malloc((n + 1) * sizeof(double));
    int64_t *n_known = malloc((n + 1) * sizeof(int64_t)), reach = n_around / 2;
    int result = sums && n_known ? 0 : -1;
    if (result == 0)
        sums[0] = n_known[0] = 0;
    for (int64_t i = 0; result == 0 && i < n; i++) {
        double total = 0;
        for (int kind = 0; kind < N_SHAPE; kind++)
            total += (shape[N_SHAPE * i + kind] - usual[kind]) / deviation[kind] * SIGNS[kind];
        sums[i + 1] = sums[i] + (isnan(log_odds[i]) ? 0 : total / N_SHAPE);
        n_known[i + 1] = n_known[i] + !isnan(log_odds[i]);
    }
    for (int64_t i = 0; result == 0 && i < n; i++) {
        int64_t low = at_least(0, i - reach), high = i + reach + 1 < n ? i + reach + 1 : n;
        double mean = (sums[high] - sums[low]) / (double)at_least(1, n_known[high] - n_known[low]);
        mean = mean < -MOST_SHAPE ? -MOST_SHAPE : mean > MOST_SHAPE ? MOST_SHAPE : mean;
        out[i] = log_odds[i] - host[1] * (gc[i] - host[0]) + weight * mean;
    }
    free(sums);
    free(n_known);
    return result;
}

/* log(exp(a) + exp(b)) */
static double log_sum(double a, double b) {
    return (a > b ? a : b) + log1p(exp(-fabs(a - b)));
}

/* Log-probabilities of the changes over so many bases, in continuous time: from host to host and to
 * virus, then from virus to host and to virus. */
int chain_step(int64_t n_bases, double host_bases, double virus_bases, double *step) {
    double mixed = -expm1(-(1 / host_bases + 1 / virus_bases) * (double)n_bases);
    double virus = virus_bases / (host_bases + virus_bases); /* share of all bases */
    step[0] = log1p(-mixed * virus);
    step[1] = log(mixed * virus);
    step[2] = log(mixed * (1 - virus));
    step[3] = log1p(-mixed * (1 - virus));
    return 0;
}

/* The changes from each item to the next; NULL without memory. */
static double *steps_of(const int64_t *starts, int64_t n, double host_bases, double virus_bases) {
    double *steps = malloc((4 * n + 1) * sizeof(double));
    for (int64_t i = 0; steps && i < n - 1; i++)
        if (i && starts[i + 1] - starts[i] == starts[i] - starts[i - 1])
            memcpy(steps + 4 * i, steps + 4 * (i - 1), 4 * sizeof(double));
        else
            chain_step(starts[i + 1] - starts[i], host_bases, virus_bases, steps + 4 * i);
    return steps;
}

/* The most probable path: 1 for virus, and 0 if both are as probable. */
static void write_path(const double *evidence, const double *steps, int64_t n, double first_share,
                       uint8_t *path) {
    double host = log1p(-first_share), virus = log(first_share) + evidence[0];
    uint8_t state;
    for (int64_t i = 1; i < n; i++, steps += 4) {
        double stay = host + steps[0], enter = host + steps[1];
        double leave = virus + steps[2], last = virus + steps[3];
        path[i] = (leave > stay) | (last > enter) << 1; /* whether a virus came before each */
        host = leave > stay ? leave : stay;
        virus = (last > enter ? last : enter) + evidence[i];
    }
    state = virus > host;
    for (int64_t i = n - 1; i >= 0; i--) {
        uint8_t before = i ? path[i] >> state & 1 : 0;
        path[i] = state;
        state = before;
    }
}

/* The log-odds that each item is viral, given all items. */
static void write_odds(const double *evidence, const double *steps, int64_t n, double first_share,
                       double *odds) {
    double behind = 0;
    odds[0] = log(first_share) - log1p(-first_share) + evidence[0];
    for (int64_t i = 1; i < n; i++) {
        const double *step = steps + 4 * (i - 1);
        odds[i] = log_sum(step[1], odds[i - 1] + step[3]) -
                  log_sum(step[0], odds[i - 1] + step[2]) + evidence[i];
    }
    for (int64_t i = n - 2; i >= 0; i--) {
        const double *step = steps + 4 * i;
        behind += evidence[i + 1];
        behind = log_sum(step[2], behind + step[3]) - log_sum(step[0], behind + step[1]);
        odds[i] += behind;
    }
}

/* The most probable path through n items, and the log-odds of each. */
int viral_path(const double *evidence, const int64_t *starts, int64_t n, double host_bases,
               double virus_bases, double first_share, uint8_t *path, double *odds) {
    double *steps = steps_of(starts, n, host_bases, virus_bases);
    if (!steps)
        return -1;
    if (n) {
        write_path(evidence, steps, n, first_share, path);
        write_odds(evidence, steps, n, first_share, odds);
    }
    free(steps);
    return 0;
}

/* The log-probability of all items over all paths, for each departure of their host's level:
 * contrasts (n,), departures (k,) -> (k,). What a contrast adds for a virus beside a host is
 * per_square * distance * (contrast - departure - distance / 2). Probabilities are multiplied, and
 * the logarithm of what they are scaled by is kept beside them. */
int log_likelihoods(const double *contrasts, const int64_t *starts, int64_t n, double host_bases,
                    double virus_bases, double first_share, const double *departures,
                    int64_t n_departures, double per_square, double distance, double *out) {
    const double smallest = 1e-100;
    double *change = steps_of(starts, n, host_bases, virus_bases);
    if (!change)
        return -1;
    for (int64_t i = 0; i < 4 * (n - 1); i++)
        change[i] = exp(change[i]);
    for (int64_t k = 0; k < n_departures; k++) {
        double host = 1 - first_share, virus = first_share, scale = 0, squares = 0;
        for (int64_t i = 0; i < n; i++) {
            const double *step = change + 4 * (i - 1);
            double value = contrasts[i] - departures[k], added, host_before = host;
            squares += value * value;
            if (i) {
                host = host * step[0] + virus * step[2];
                virus = host_before * step[1] + virus * step[3];
            }
            added = per_square * distance * (value - distance / 2);
            if (added > 0) { /* the other one is less likely, so that nothing overflows */
                host *= exp(-added);
                scale += added;
            } else
                virus *= exp(added);
            if (host + virus < smallest) {
                host /= smallest;
                virus /= smallest;
                scale += log(smallest);
            }
        }
        out[k] = log(host + virus) + scale - per_square * squares / 2;
    }
    free(change);
    return 0;
}

/* Number the words of `size` letters; -1: a word has an unknown letter. */
static void number_words(const uint8_t *digits, int64_t n, int64_t size, int64_t *words) {
    const int64_t mask = (INT64_C(1) << 2 * size) - 1;
    int64_t word = 0, n_known = 0;
    for (int64_t i = 0; i < n; i++) {
        n_known = digits[i] < UNKNOWN ? n_known + 1 : 0;
        word = (4 * word + (digits[i] & 3)) & mask;
        if (i + 1 >= size)
            words[i + 1 - size] = n_known >= size ? word : -1;
    }
}

/* Maximal common words of at least `size` letters: place in left, place in right, length.
 *
 * Each begins with a word that occurs once or twice in left; its length is at most `longest`. The
 * caller allocates two rows per letter of right. */
int common_words(const uint8_t *left, int64_t n_left, const uint8_t *right, int64_t n_right,
                 int64_t size, int64_t longest, int64_t *rows, int64_t *n_rows) {
    int64_t of_left = n_left - size + 1, of_right = n_right - size + 1, n_slots = 1024;
    int64_t *words, *to = rows;
    int32_t *first, *next;
    int bits = 10;
    *n_rows = 0;
    if (of_left <= 0 || of_right <= 0)
        return 0;
    for (; n_slots < 2 * of_left; n_slots *= 2)
        bits++;
    words = malloc((of_left + of_right) * sizeof(int64_t));
    first = malloc(n_slots * sizeof(int32_t));
    next = malloc(of_left * sizeof(int32_t));
    if (!words || !first || !next) {
        free(words);
        free(first);
        free(next);
        return -1;
    }
    number_words(left, n_left, size, words);
    number_words(right, n_right, size, words + of_left);
    memset(first, 0xff, n_slots * sizeof(int32_t));
    for (int64_t i = of_left - 1; i >= 0; i--) {
        uint64_t slot = hash_of(words[i]) >> (64 - bits);
        next[i] = first[slot];
        first[slot] = (int32_t)i;
    }
    for (int64_t j = 0; j < of_right; j++) {
        int64_t word = words[of_left + j], places[3], n_places = 0;
        if (word < 0)
            continue;
        for (int32_t i = first[hash_of(word) >> (64 - bits)]; i >= 0 && n_places < 3; i = next[i])
            if (words[i] == word)
                places[n_places++] = i;
        for (int64_t place = 0; n_places < 3 && place < n_places; place++) {
            int64_t i = places[place], n = size;
            if (i && j && left[i - 1] == right[j - 1] && left[i - 1] != UNKNOWN)
                continue; /* part of a longer common word */
            while (n < longest && i + n < n_left && j + n < n_right && left[i + n] != UNKNOWN &&
                   left[i + n] == right[j + n])
                n++;
            *to++ = i;
            *to++ = j;
            *to++ = n;
        }
    }
    *n_rows = (to - rows) / 3;
    free(words);
    free(first);
    free(next);
    return 0;
}

/* Count the words of `size` letters, at most six, in both rows together, and the ordered pairs of
 * equal words. Words with an unknown letter do not count. */
int equal_words(const uint8_t *left, int64_t n_left, const uint8_t *right, int64_t n_right,
                int64_t size, int64_t *counts) {
    int64_t n_of_word[1 << 12] = {0}, n_equal = 0, n_words = 0;
    for (int part = 0; part < 2; part++) {
        const uint8_t *digits = part ? right : left;
        int64_t n = part ? n_right : n_left, word = 0, n_known = 0;
        for (int64_t i = 0; i < n; i++) {
            n_known = digits[i] < UNKNOWN ? n_known + 1 : 0;
            word = (4 * word + (digits[i] & 3)) & ((INT64_C(1) << 2 * size) - 1);
            n_of_word[word] += n_known >= size;
        }
    }
    for (int64_t word = 0; word < INT64_C(1) << 2 * size; word++) {
        n_words += n_of_word[word];
        n_equal += n_of_word[word] * (n_of_word[word] - 1);
    }
    counts[0] = n_words;
    counts[1] = n_equal;
    return 0;
}

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

/* Add to counts how often each word, of twelve letters or more, occurs in a text.
 *
 * Copies of one word do not overlap. Some eight letters of a word always begin at a multiple of
 * five, so only these places of the text are searched. */
int count_words(const uint8_t *text, int64_t n, const uint8_t *words, const int64_t *lengths,
                int64_t n_words, int64_t *counts) {
    enum { EVERY = 5 };
    const uint64_t multiplier = UINT64_C(0x9E3779B97F4A7C15);
    uint8_t *is_part = calloc(1 << 13, 1); /* a bit for each hash of eight letters */
    int64_t *ends = calloc(n_words + 1, sizeof(int64_t)); /* first places where each may begin */
    int is_short = !is_part || !ends;
    const uint8_t *word = words;
    uint64_t eight, of_word, hash;
    for (int64_t i = 0; !is_short && i < n_words; word += lengths[i++]) {
        for (int first = 0; first < EVERY; first++) {
            memcpy(&eight, word + first, 8);
            hash = eight * multiplier >> 48;
            is_part[hash >> 3] |= 1 << (hash & 7);
        }
    }
    for (int64_t place = 0; !is_short && place + 8 <= n; place += EVERY) {
        memcpy(&eight, text + place, 8);
        hash = eight * multiplier >> 48;
        if (!(is_part[hash >> 3] >> (hash & 7) & 1))
            continue;
        word = words;
        for (int64_t i = 0; i < n_words; word += lengths[i++])
            for (int64_t start = place - EVERY + 1; start <= place; start++) {
                memcpy(&of_word, word + (place - start), 8); /* a cheap test, mostly false */
                if (of_word == eight && start >= ends[i] && start + lengths[i] <= n &&
                    memcmp(word, text + start, lengths[i]) == 0) {
                    counts[i]++;
                    ends[i] = start + lengths[i];
                }
            }
    }
    free(is_part);
    free(ends);
    return is_short ? -1 : 0;
}

/* Rows of tables */

/* What a column of a table holds; a positive kind is the number of decimals. */
enum { LETTERS = -2, TEXTS = -1, WHOLE = 0, WIDTH = 60 /* letters of a line */ };

static uint8_t *put_whole(uint8_t *out, uint64_t value, int n_digits) {
    uint8_t digits[24];
    int n = 0;
    for (; value || n < n_digits; value /= 10)
        digits[n++] = '0' + value % 10;
    while (n)
        *out++ = digits[--n];
    return out;
}

/* Write the nearest decimal to a number below 2^51 / 10^n; half to even. */
static uint8_t *put_decimal(uint8_t *out, double value, int n_decimals) {
    uint64_t scale = 1;
    for (int i = 0; i < n_decimals; i++)
        scale *= 10;
    if (signbit(value))
        *out++ = '-';
    value = fabs(value);
    double below = floor(value * scale);
    double more = fma(value, scale, -(below + 0.5)); /* its sign is exact */
    uint64_t whole = (uint64_t)below;
    whole += more > 0 || (more == 0 && whole % 2);
    out = put_whole(out, whole / scale, 1);
    *out++ = '.';
    return put_whole(out, whole % scale, n_decimals);
}

/* Texts and letters end with a NUL. NaN and the least whole number leave a field empty. */
static uint8_t *put_field(uint8_t *out, int64_t kind, const uint8_t **column) {
    if (kind == WHOLE) {
        int64_t value;
        memcpy(&value, *column, sizeof value);
        *column += sizeof value;
        if (value == INT64_MIN)
            return out;
        if (value < 0)
            *out++ = '-';
        return put_whole(out, value < 0 ? -(uint64_t)value : (uint64_t)value, 1);
    }
    if (kind > 0) {
        double value;
        memcpy(&value, *column, sizeof value);
        *column += sizeof value;
        return isnan(value) ? out : put_decimal(out, value, (int)kind);
    }
    int64_t n = strlen((const char *)*column);
    const uint8_t *text = *column;
    *column += n + 1;
    if (kind == TEXTS) {
        memcpy(out, text, n);
        return out + n;
    }
    for (; n > 0; n -= WIDTH, text += WIDTH) {
        int64_t width = n < WIDTH ? n : WIDTH;
        *out++ = '\n';
        memcpy(out, text, width);
        out += width;
    }
    return out;
}

/* Write a line for each row. `before` has the text that precedes the fields of each column, such as
 * a tab. The pointers to the columns move to their ends. */
int write_rows(int64_t n_rows, int64_t n_columns, const int64_t *kinds, const uint8_t **columns,
               const uint8_t *before, uint8_t *out, int64_t *n_written) {
    const uint8_t *first = out;
    for (int64_t row = 0; row < n_rows; row++) {
        const uint8_t *text = before;
        for (int64_t column = 0; column < n_columns; column++, text++) {
            while (*text)
                *out++ = *text++;
            out = put_field(out, kinds[column], columns + column);
        }
        *out++ = '\n';
    }
    *n_written = out - first;
    return 0;
}

/* Find the ends of the fields of lines. The last field of a line takes all that remains. n_read
 * counts the lines before the first one with too few fields. */
int split_fields(const uint8_t *text, int64_t n_bytes, int64_t n_columns, int64_t *ends,
                 int64_t *n_read) {
    const uint8_t *at = text, *end = text + n_bytes;
    *n_read = 0;
    while (at < end) {
        const uint8_t *line_end = memchr(at, '\n', end - at);
        for (int64_t column = 1; column < n_columns && line_end; column++) {
            at = memchr(at, '\t', line_end - at);
            if (!at)
                return 0;
            *ends++ = at++ - text;
        }
        if (!line_end)
            return 0;
        *ends++ = line_end - text;
        at = line_end + 1;
        ++*n_read;
    }
    return 0;
}

/* Read the numbers in fields: a sign, digits and at most one point; NaN: the field is empty. n_read
 * counts the fields before the first invalid one. */
int read_numbers(const uint8_t *text, const int64_t *starts, const int64_t *ends, int64_t n,
                 double *values, int64_t *n_read) {
    enum { MOST_DIGITS = 15 }; /* a double holds both parts of the division exactly */
    for (*n_read = 0; *n_read < n; ++*n_read) {
        const uint8_t *at = text + starts[*n_read], *end = text + ends[*n_read];
        const uint8_t *point = NULL;
        double value = 0, scale = at < end && *at == '-' ? -1 : 1;
        int n_digits = 0, is_signed = scale < 0;
        *values = NAN;
        at += is_signed;
        for (; at < end; at++) {
            if (*at == '.' && !point && n_digits) {
                point = at;
            } else if (*at >= '0' && *at <= '9' && n_digits < MOST_DIGITS) {
                value = 10 * value + (*at - '0');
                scale *= point ? 10 : 1;
                n_digits++;
            } else {
                return 0;
            }
        }
        if (n_digits)
            *values = value / scale;
        else if (is_signed)
            return 0;
        values++;
    }
    return 0;
}

/* Whether each field differs from the previous one; the first does. */
int find_changes(const uint8_t *text, const int64_t *starts, const int64_t *ends, int64_t n,
                 uint8_t *is_new) {
    for (int64_t i = 0; i < n; i++) {
        int64_t length = ends[i] - starts[i];
        is_new[i] = !i || length != ends[i - 1] - starts[i - 1] ||
                    memcmp(text + starts[i], text + starts[i - 1], length) != 0;
    }
    return 0;
}
