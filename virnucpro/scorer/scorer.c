/* What the scorer reads of pieces, in one pass: stretches, words, counts and figures.
 *
 * Called by library.py, which documents the arrays. No function keeps anything between two calls
 * or touches Python, so calls may run side by side. Each returns 0, or -1 where memory is short.
 * Digits of bases are 0 to 3 for A, C, G and T, and 4 for any other letter; a codon is
 * 25 a + 5 b + c. Nothing here may be compiled with -ffast-math: scores are the same everywhere.
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
    ABUTTING = 60 /* bases */
};

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 ""
#endif

/* Of the source that the library was built from. */
const char source_sha256[] = SOURCE_SHA256;

static const double MOST_COVERED = 0.3 * 3; /* bases of a codon */
static const double LEAST_GAP = -200, MOST_GAP = 2000;
static const float LEAST_GC = 0.05F, MOST_GC = 0.95F;
static const int64_t WORDS_BEFORE_LAST = 512000000000 / 20; /* 20^8 */

/* Tables of one genetic code, by the code of a codon. */
typedef struct {
    const uint8_t *is_stop;
    const uint8_t *synonym; /* the codon that it counts as */
    const uint8_t *residue; /* N_RESIDUES: none */
} Code;

typedef struct {
    const int32_t *first; /* of each bucket, and the end */
    const uint16_t *entries;
    int64_t n_entries;
} Words;

typedef struct {
    int32_t strand, start, n_codons; /* start: bases, on its strand */
    int32_t first;                   /* base on the forward strand */
} Stretch;

/* A block of sequence: what is looked up once for all of its pieces. */
typedef struct {
    const uint8_t *digits;
    int64_t n;
    uint8_t *codes;     /* of the codon from each base on */
    int32_t *stops[2];  /* places of stop codons of each strand, rising */
    int64_t n_stops[2];
    uint8_t other[N_CODES]; /* the code of the codon on the opposite strand */
} Block;

/* Room for one piece. */
typedef struct {
    Stretch *rows[6], *sorted, *kept; /* by frame; all, longest first; those kept of these */
    int32_t n_rows[6], n_stops[6], longest[6];
    int64_t n_found, n_kept, n_covered;
    int32_t *n_of_length;
    uint64_t *covered;
} Room;

static uint8_t opposite(uint8_t digit) { return digit < UNKNOWN ? 3 - digit : UNKNOWN; }

static int64_t at_least(int64_t least, int64_t value) { return value < least ? least : value; }

/* By the library, which is faster than what compilers put in the place of a short memset. */
__attribute__((noinline)) static void clear(void *values, size_t n_bytes) {
    memset(values, 0, n_bytes);
}

static double larger(double a, double b) { return a > b ? a : b; }

static int n_bits_of(uint64_t bits) {
    bits -= (bits >> 1) & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + ((bits >> 2) & UINT64_C(0x3333333333333333));
    bits = (bits + (bits >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int)((bits * UINT64_C(0x0101010101010101)) >> 56);
}

/* Blocks and rooms. What opens one is given it empty, and leaves it to be closed if memory is
 * short. */

static void close_block(Block *block) {
    free(block->codes);
    free(block->stops[0]);
    free(block->stops[1]);
}

static int open_block(Block *block, const uint8_t *digits, int64_t n, const uint8_t *is_stop) {
    uint8_t kinds[N_CODES];
    int64_t n_codes = at_least(0, n - 2), n_stops[2] = {0, 0};
    for (int code = 0; code < N_CODES; code++) {
        uint8_t a = code / 25, b = code / 5 % 5, c = code % 5;
        block->other[code] = 25 * opposite(c) + 5 * opposite(b) + opposite(a);
    }
    for (int code = 0; code < N_CODES; code++)
        kinds[code] = is_stop[code] | is_stop[block->other[code]] << 1;
    block->digits = digits;
    block->n = n;
    block->codes = malloc(n_codes + 1);
    block->stops[0] = malloc((n_codes + 1) * sizeof(int32_t));
    block->stops[1] = malloc((n_codes + 1) * sizeof(int32_t));
    if (!block->codes || !block->stops[0] || !block->stops[1])
        return -1;
    for (int64_t i = 0; i < n_codes; i++)
        block->codes[i] = 25 * digits[i] + 5 * digits[i + 1] + digits[i + 2];
    for (int64_t i = 0; i < n_codes; i++) {
        uint8_t kind = kinds[block->codes[i]];
        block->stops[0][n_stops[0]] = block->stops[1][n_stops[1]] = (int32_t)i;
        n_stops[0] += kind & 1;
        n_stops[1] += kind >> 1;
    }
    block->n_stops[0] = n_stops[0];
    block->n_stops[1] = n_stops[1];
    return 0;
}

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
    /* a stretch of a frame and the stop behind it have two codons or more */
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
    int32_t strand = row / 3, place = row % 3 + 3 * start;
    Stretch *stretch = room->rows[row] + room->n_rows[row];
    if (n_codons > room->longest[row])
        room->longest[row] = n_codons;
    if (n_codons < shortest)
        return;
    stretch->strand = strand;
    stretch->start = place;
    stretch->n_codons = n_codons;
    stretch->first = strand ? length - place - 3 * n_codons : place;
    room->n_rows[row]++;
    room->n_of_length[n_codons]++;
}

/* The first of rising places that is not below a value. */
static int64_t first_from(const int32_t *places, int64_t n, int64_t value) {
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (places[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void find_in_strand(const Block *block, int strand, int64_t from, int32_t length,
                           int32_t shortest, Room *room) {
    const int32_t *stops = block->stops[strand];
    int64_t first = first_from(stops, block->n_stops[strand], from);
    int64_t end = first_from(stops, block->n_stops[strand], from + length - 2);
    int32_t start[3] = {0, 0, 0};
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

/* Longest first; of equally long ones by strand, frame and place. */
static void sort_stretches(Room *room, int32_t shortest) {
    int32_t longest = 0, n_before = 0;
    for (int row = 0; row < 6; row++)
        if (room->longest[row] > longest)
            longest = room->longest[row];
    for (int32_t n_codons = longest; n_codons >= shortest; n_codons--) {
        int32_t n = room->n_of_length[n_codons];
        room->n_of_length[n_codons] = n_before;
        n_before += n;
    }
    for (int row = 0; row < 6; row++)
        for (int32_t i = 0; i < room->n_rows[row]; i++) {
            const Stretch *stretch = room->rows[row] + i;
            room->sorted[room->n_of_length[stretch->n_codons]++] = *stretch;
        }
    if (longest >= shortest)
        memset(room->n_of_length + shortest, 0, (longest - shortest + 1) * sizeof(int32_t));
    room->n_found = n_before;
}

/* Bits of the word of 64 that lie from start to before end. */
static uint64_t bits_between(int32_t word, int32_t start, int32_t end) {
    uint64_t bits = ~UINT64_C(0);
    if (start > 64 * word)
        bits <<= start - 64 * word;
    if (end < 64 * word + 64)
        bits &= (UINT64_C(1) << (end - 64 * word)) - 1;
    return bits;
}

/* Keep those that longer ones hardly cover. */
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
}

static void find_stretches(const Block *block, int64_t from, int32_t length, int32_t shortest,
                           Room *room) {
    clear(room->n_rows, sizeof room->n_rows);
    clear(room->n_stops, sizeof room->n_stops);
    clear(room->longest, sizeof room->longest);
    for (int strand = 0; strand < 2; strand++)
        find_in_strand(block, strand, from, length, shortest, room);
    sort_stretches(room, shortest);
    choose_stretches(room, length);
}

/* Sort stretches by their first base; of equal ones the longest stays first. */
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

static int64_t bucket_of(uint64_t hash) {
    int64_t bucket = (int64_t)(hash >> (64 - BUCKET_BITS));
    return hash & (RARITY - 1) ? bucket : bucket + (1 << BUCKET_BITS);
}

static int owner_of(const Words *words, uint64_t hash) {
    int64_t bucket = bucket_of(hash);
    uint16_t rest = (hash >> (64 - BUCKET_BITS - REST_BITS)) & ((1 << REST_BITS) - 1);
    for (int32_t i = words->first[bucket]; i < words->first[bucket + 1]; i++) {
        uint16_t entry = words->entries[i];
        if (entry >> OWNER_BITS == rest)
            return entry & ((1 << OWNER_BITS) - 1);
        if (entry >> OWNER_BITS > rest)
            break;
    }
    return 0;
}

/* Replaces each hash by what it leads to, in steps that wait for memory side by side. */
static void owners_of_hashes(const Words *words, const uint64_t *hashes, int64_t n,
                             uint8_t *owners) {
    enum { AT_ONCE = 64 };
    for (int64_t low = 0; low < n; low += AT_ONCE) {
        int64_t high = low + AT_ONCE < n ? low + AT_ONCE : n;
        for (int64_t i = low; i < high; i++)
            __builtin_prefetch(words->first + bucket_of(hashes[i]));
        for (int64_t i = low; i < high; i++)
            __builtin_prefetch(words->entries + words->first[bucket_of(hashes[i])]);
        for (int64_t i = low; i < high; i++)
            owners[i] = (uint8_t)owner_of(words, hashes[i]);
    }
}

int owners_of(const int64_t *numbers, int64_t n, const int32_t *first, const uint16_t *entries,
              int64_t n_entries, uint8_t *owners) {
    Words words = {first, entries, n_entries};
    uint64_t *hashes = malloc((n + 1) * sizeof(uint64_t));
    if (!hashes)
        return -1;
    for (int64_t i = 0; i < n; i++)
        hashes[i] = hash_of(numbers[i]);
    owners_of_hashes(&words, hashes, n, owners);
    free(hashes);
    return 0;
}

/* Features */

/* What the features of all pieces of a call share. */
typedef struct {
    uint8_t codes[2][N_CODES];    /* of each strand, read by the code of the forward strand */
    uint8_t numbers[2][N_CODES];  /* of known codons; N_CODONS: unknown */
    uint8_t residues[2][N_CODES];
    uint8_t tetra[5 * N_CODES];   /* N_TETRA: unknown */
    uint8_t code_of_number[N_CODONS];
    uint8_t n_gc[N_CODONS];
    uint8_t stops[N_CODONS][3];
    int n_stops;
    double *times_log, *log_half, *log1p; /* of counts: n log n, log(n + 1/2), log(n + 1) */
} Tables;

/* Counts of one piece. Those of junctions and pairs are 0 between two pieces. */
typedef struct {
    int32_t long_codes[N_CODES], longest_codes[N_CODES];
    int32_t junctions[2][N_JUNCTIONS], n_junctions, most_junctions;
    int32_t pairs[N_PAIRS], n_pairs, most_pairs;
    int32_t bases[4], twos, fours[16], sixes;
    int32_t owners[N_OWNERS];
    int64_t n_words;
    uint64_t *hashes;  /* of words */
    uint8_t *found;    /* owners of words; before that, where palindromes are */
    uint16_t *met[3];  /* junctions of both kinds, and pairs, as they come */
} Tally;

static void close_tables(Tables *tables) {
    free(tables->times_log);
    free(tables->log_half);
    free(tables->log1p);
}

static void number_tetra(Tables *tables) {
    uint8_t number_of[256], n_numbers = 0;
    for (int word = 0; word < 256; word++) {
        int other = 0;
        for (int i = 0; i < 4; i++)
            other = 4 * other + 3 - (word >> 2 * i & 3);
        number_of[word] = other < word ? number_of[other] : n_numbers++;
    }
    memset(tables->tetra, N_TETRA, sizeof tables->tetra);
    for (int word = 0; word < 256; word++) {
        int codon = word >> 2;
        int code = 25 * (codon >> 4) + 5 * (codon >> 2 & 3) + (codon & 3);
        tables->tetra[5 * code + (word & 3)] = number_of[word];
    }
}

static int open_tables(Tables *tables, const Code *code, const Block *block, int64_t longest) {
    for (int i = 0; i < N_CODES; i++)
        for (int strand = 0; strand < 2; strand++) {
            uint8_t counted = code->synonym[strand ? block->other[i] : i];
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
    number_tetra(tables);
    tables->times_log = malloc((longest + 1) * sizeof(double));
    tables->log_half = malloc((longest + 1) * sizeof(double));
    tables->log1p = malloc((longest + 1) * sizeof(double));
    if (!tables->times_log || !tables->log_half || !tables->log1p)
        return -1;
    for (int64_t i = 0; i <= longest; i++) {
        tables->times_log[i] = i * log(larger(1, i));
        tables->log_half[i] = log(i + 0.5);
        tables->log1p[i] = log1p(i);
    }
    return 0;
}

static void close_tally(Tally *tally) {
    free(tally->hashes);
    free(tally->found);
    for (int i = 0; i < 3; i++)
        free(tally->met[i]);
}

static int open_tally(Tally *tally, int64_t longest) {
    /* codons of all stretches that are read, which may lie on each other; more than bases */
    size_t n = MOST_STRETCHES * (longest / 3 + 1);
    int is_short = 0;
    is_short |= !(tally->hashes = malloc(n * sizeof(uint64_t)));
    is_short |= !(tally->found = malloc(n));
    for (int i = 0; i < 3; i++)
        is_short |= !(tally->met[i] = malloc(n * sizeof(uint16_t)));
    return is_short ? -1 : 0;
}

static void count_stretch(const Block *block, const Tables *tables, int64_t from, int32_t length,
                          const Stretch *stretch, int is_longest, int has_words, Tally *tally) {
    int strand = stretch->strand;
    int64_t step = strand ? -3 : 3;
    const uint8_t *code = block->codes + from;
    const uint8_t *codes = tables->codes[strand], *numbers = tables->numbers[strand];
    const uint8_t *residues = tables->residues[strand];
    int left = N_CODONS, before = N_RESIDUES, n_known = 0;
    int64_t word = 0;
    code += strand ? length - 3 - stretch->start : stretch->start;
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
        if (!has_words)
            continue;
        if (residue == N_RESIDUES) {
            n_known = 0;
            word = 0;
            continue;
        }
        word = word % WORDS_BEFORE_LAST * N_RESIDUES + residue;
        if (++n_known >= WORD)
            tally->hashes[tally->n_words++] = hash_of(word);
    }
}

static void count_codons(const Block *block, const Tables *tables, const Words *words,
                         int64_t from, int32_t length, const Room *room, Tally *tally) {
    clear(tally->long_codes, sizeof tally->long_codes);
    clear(tally->longest_codes, sizeof tally->longest_codes);
    clear(tally->owners, sizeof tally->owners);
    tally->n_junctions = tally->most_junctions = tally->n_pairs = tally->most_pairs = 0;
    tally->n_words = 0;
    for (int64_t rank = 0; rank < room->n_kept && rank < MOST_STRETCHES; rank++) {
        const Stretch *stretch = room->kept + rank;
        if (rank && stretch->n_codons < LONG)
            break;
        count_stretch(block, tables, from, length, stretch, rank == 0, words->n_entries > 0,
                      tally);
        if (rank == 0)
            memcpy(tally->longest_codes, tally->long_codes, sizeof tally->long_codes);
    }
    owners_of_hashes(words, tally->hashes, tally->n_words, tally->found);
    for (int64_t i = 0; i < tally->n_words; i++)
        tally->owners[tally->found[i]]++;
}

static void count_bases(const uint8_t *digits, int32_t length, Tally *tally) {
    int32_t a = 0, c = 0, g = 0, t = 0, twos = 0;
    for (int32_t i = 0; i < length; i++) {
        a += digits[i] == 0;
        c += digits[i] == 1;
        g += digits[i] == 2;
        t += digits[i] == 3;
    }
    for (int32_t i = 0; i < length - 1; i++)
        twos += digits[i] + digits[i + 1] == 3;
    tally->bases[0] = a;
    tally->bases[1] = c;
    tally->bases[2] = g;
    tally->bases[3] = t;
    tally->twos = twos;
}

static void count_palindromes(const uint8_t *digits, int32_t length, uint8_t *is_four,
                              Tally *tally) {
    clear(tally->fours, sizeof tally->fours);
    tally->sixes = 0;
    for (int32_t i = 0; i < length - 3; i++)
        is_four[i] = (digits[i] + digits[i + 3] == 3) & (digits[i + 1] + digits[i + 2] == 3);
    for (int32_t first = 0; first < length - 3; first += 8) {
        int32_t end = first + 8 < length - 3 ? first + 8 : length - 3;
        uint64_t eight = 0;
        memcpy(&eight, is_four + first, end - first);
        if (!eight)
            continue;
        for (int32_t i = first; i < end; i++) {
            if (!is_four[i])
                continue;
            tally->fours[4 * digits[i] + digits[i + 1]]++;
            if (i > 0 && i + 4 < length)
                tally->sixes += digits[i - 1] + digits[i + 4] == 3;
        }
    }
}

/* Entropy of tetranucleotides, each counted with its reverse complement. */
static double entropy_of(const Block *block, const Tables *tables, int64_t from, int32_t length) {
    int32_t counts[4][N_TETRA + 1];
    const uint8_t *codes = block->codes + from, *last = block->digits + from + 3;
    int64_t total = 0;
    double sum = 0;
    clear(counts, sizeof counts);
    for (int32_t i = 0; i < length - 3; i++)
        counts[i & 3][tables->tetra[5 * codes[i] + last[i]]]++;
    for (int i = 0; i < N_TETRA; i++) {
        int32_t n = counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i];
        total += n;
        sum += tables->times_log[n];
    }
    total = at_least(1, total);
    return log(total) - sum / total;
}

static void write_roots(const int32_t *counts, int32_t total, int32_t most, uint16_t *met,
                        int32_t n_met, float *roots, float *out) {
    for (int32_t n = 1; n <= most; n++)
        roots[n] = sqrtf((float)n / (float)total);
    for (int32_t i = 0; i < n_met; i++)
        out[met[i]] = roots[counts[met[i]]];
}

static void write_codons(const Tables *tables, const int32_t *codes, float gc, float *roots,
                         float *ratios) {
    double share = gc < LEAST_GC ? LEAST_GC : gc > MOST_GC ? MOST_GC : gc;
    double strong = share / 2, weak = (1 - share) / 2, expected[4];
    int32_t total = 0;
    for (int i = 0; i < N_CODONS; i++)
        total += codes[tables->code_of_number[i]];
    expected[0] = log(weak * weak * weak * total + 0.5);
    expected[1] = log(strong * (weak * weak) * total + 0.5);
    expected[2] = log(strong * strong * weak * total + 0.5);
    expected[3] = log(strong * strong * strong * total + 0.5);
    for (int i = 0; i < N_CODONS; i++) {
        int32_t n = codes[tables->code_of_number[i]];
        roots[i] = n ? sqrtf((float)n / (float)total) : 0;
        ratios[i] = (float)(tables->log_half[n] - expected[tables->n_gc[i]]);
    }
}

static double log_beside(double n, double expected, double added) {
    return log((n + added) / (larger(0, expected) + added));
}

static void write_palindromes(const Tables *tables, const Tally *tally, float *out) {
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
        out[word] = (float)(tables->log_half[tally->fours[word]] - expected[is_strong][is_next]);
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

static void write_stretches(const Tables *tables, Room *room, double n_bases, float *out) {
    int32_t n_long = 0, n_reverse = 0, n_switches = 0;
    for (int i = 0; i < 3; i++)
        out[i] = i < room->n_kept ? (float)tables->log1p[room->kept[i].n_codons] : 0;
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

/* The stops and the longest stretch of each frame, and what they are beside chance. */
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
        out[6 + i] = (float)tables->log1p[room->longest[5 - i]];
    }
    out[12] = (float)(2 * chance);
    out[13] = (float)(tables->log1p[room->longest[5]] - log1p(by_chance));
    out[14] = (float)(n_stops / (2 * n_bases) - chance);
}

/* GC, purines and A at each codon position of the longest stretch. */
static void write_positions(const Tally *tally, float *out) {
    double counts[3][5];
    clear(counts, sizeof counts);
    for (int code = 0; code < N_CODES; code++) {
        counts[0][code / 25] += tally->longest_codes[code];
        counts[1][code / 5 % 5] += tally->longest_codes[code];
        counts[2][code % 5] += tally->longest_codes[code];
    }
    for (int i = 0; i < 3; i++) {
        const double *of = counts[i];
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

static void write_features(const Block *block, const Tables *tables, const Words *words,
                           int64_t from, int32_t length, Room *room, Tally *tally, float *roots,
                           float *out) {
    float *longest = out, *long_ones = out + N_CODONS, *junctions = out + 2 * N_CODONS;
    float *pairs = junctions + 2 * N_JUNCTIONS, *palindromes = pairs + N_PAIRS;
    float *figures = palindromes + N_PALINDROMES, *owners = figures + N_FIGURES;
    float *ratios = owners + N_OWNERS - 1;
    double n_bases = (double)at_least(1, length);
    find_stretches(block, from, length, SHORTEST, room);
    count_codons(block, tables, words, from, length, room, tally);
    count_bases(block->digits + from, length, tally);
    count_palindromes(block->digits + from, length, tally->found, tally);
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
    write_palindromes(tables, tally, palindromes);
    write_spelling(tally, figures);
    write_stretches(tables, room, n_bases, figures + 3);
    write_frames(tables, tally, room, n_bases, figures + 11);
    write_positions(tally, figures + 26);
    figures[35] = (float)entropy_of(block, tables, from, length);
    write_owners(tally, owners);
    write_codons(tables, tally->longest_codes, figures[0], longest, ratios);
    write_codons(tables, tally->long_codes, figures[0], long_ones, ratios + N_CODONS);
}

int piece_features(const uint8_t *digits, int64_t n_digits, const int64_t *starts,
                   const int64_t *lengths, int64_t n, const uint8_t *code_tables,
                   const int32_t *first, const uint16_t *entries, int64_t n_entries, float *out,
                   uint8_t *is_blank) {
    Code code = {code_tables, code_tables + N_CODES, code_tables + 2 * N_CODES};
    Words words = {first, entries, n_entries};
    int64_t longest = longest_of(lengths, n);
    int64_t most = MOST_STRETCHES * (longest / 3 + 1) + longest; /* counts are not above it */
    float *roots = malloc((most + 1) * sizeof(float));
    Block block = {0};
    Room room = {0};
    Tables tables = {0};
    Tally tally = {0};
    int result = -1;
    if (roots && open_block(&block, digits, n_digits, code.is_stop) == 0 &&
        open_room(&room, longest) == 0 && open_tables(&tables, &code, &block, most) == 0 &&
        open_tally(&tally, longest) == 0) {
        for (int64_t i = 0; i < n; i++) {
            const int32_t *bases = tally.bases;
            write_features(&block, &tables, &words, starts[i], (int32_t)lengths[i], &room, &tally,
                           roots, out + i * N_FEATURES);
            is_blank[i] = bases[0] + bases[1] + bases[2] + bases[3] == 0;
        }
        result = 0;
    }
    close_tally(&tally);
    close_tables(&tables);
    close_room(&room);
    close_block(&block);
    free(roots);
    return result;
}

/* Stretches by themselves */

/* The kept stretches of each piece, longest first: rank, strand, start and codons of each row.
 *
 * There is room for one row per SHORTEST codons of six frames. */
int kept_stretches(const uint8_t *digits, int64_t n_digits, const int64_t *starts,
                   const int64_t *lengths, int64_t n, const uint8_t *is_stop, int64_t shortest,
                   int64_t *n_kept, int64_t *n_covered, int64_t *rows) {
    Block block = {0};
    Room room = {0};
    int result = -1;
    if (open_block(&block, digits, n_digits, is_stop) == 0 &&
        open_room(&room, longest_of(lengths, n)) == 0) {
        for (int64_t i = 0; i < n; i++) {
            find_stretches(&block, starts[i], (int32_t)lengths[i], (int32_t)shortest, &room);
            n_kept[i] = room.n_kept;
            n_covered[i] = room.n_covered;
            for (int64_t rank = 0; rank < room.n_kept; rank++) {
                *rows++ = room.kept[rank].strand;
                *rows++ = room.kept[rank].start;
                *rows++ = room.kept[rank].n_codons;
            }
        }
        result = 0;
    }
    close_room(&room);
    close_block(&block);
    return result;
}

/* How the gene-like stretches of a piece lie. */
static void write_layout(Room *room, double kilobases, double *out) {
    const Stretch *kept = room->kept;
    int64_t n = room->n_kept, n_genes = 0, n_reverse = 0, n_switches = 0, n_short = 0;
    double total = 0, squares = 0, of_genes = 0, gaps = 0, commoner;
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
            gaps += gap / 1000;
        }
        if (n_codons < GENE)
            continue;
        n_switches += strand >= 0 && strand != kept[i].strand;
        strand = kept[i].strand;
        n_genes++;
        n_reverse += strand;
        of_genes += 3 * n_codons / 1000;
    }
    commoner = n_reverse / larger(1e-9, (double)n_genes);
    out[0] = n / kilobases;
    out[1] = 3 * total / 1000 / kilobases;
    out[2] = log(larger(1, middle));
    out[3] = log(larger(1, total / larger(1e-9, (double)n)));
    out[4] = log(larger(1, longest));
    out[5] = log(larger(1, sqrt(squares / larger(1e-9, total))));
    out[6] = n_genes / kilobases;
    out[7] = of_genes / kilobases;
    out[8] = n_switches / larger(1e-9, (double)n_genes - 1);
    out[9] = n_genes > 1 ? larger(commoner, 1 - commoner) : 0;
    out[10] = n_short / larger(1e-9, (double)n - 1);
    out[11] = gaps / larger(1e-9, (double)n - 1);
}

int layout_features(const uint8_t *digits, int64_t n_digits, const int64_t *starts,
                    const int64_t *lengths, int64_t n, const uint8_t *is_stop, double *out) {
    Block block = {0};
    Room room = {0};
    int result = -1;
    if (open_block(&block, digits, n_digits, is_stop) == 0 &&
        open_room(&room, longest_of(lengths, n)) == 0) {
        for (int64_t i = 0; i < n; i++) {
            find_stretches(&block, starts[i], (int32_t)lengths[i], GENE_LIKE, &room);
            write_layout(&room, at_least(1, lengths[i]) / 1000.0, out + i * N_LAYOUT);
        }
        result = 0;
    }
    close_room(&room);
    close_block(&block);
    return result;
}

/* The first layer of nets, in whole numbers, which no order of sums changes */

enum {
    OUTPUTS = 16, /* of a layer that are computed at once */
    ROWS = 4,     /* of features that are computed at once: registers hold all sums */
    ROWS_PACKED = 12 * ROWS,
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* Whether the processor has the instructions, and the system keeps their registers. */
static int has_avx2(void) {
    unsigned a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    return (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

/* Pairs of levels of ROWS rows times pairs of weights of OUTPUTS outputs. */
__attribute__((target("avx2"))) static void multiply_avx2(const int16_t *weights,
                                                          const int32_t *levels, int64_t n_pairs,
                                                          int32_t sums[ROWS][OUTPUTS]) {
    __m256i low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; row++)
        low[row] = high[row] = _mm256_setzero_si256();
    for (int64_t i = 0; i < n_pairs; i++, weights += 2 * OUTPUTS, levels += ROWS) {
        __m256i first = _mm256_loadu_si256((const __m256i *)weights);
        __m256i second = _mm256_loadu_si256((const __m256i *)(weights + OUTPUTS));
        for (int row = 0; row < ROWS; row++) {
            __m256i pair = _mm256_set1_epi32(levels[row]);
            low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(first, pair));
            high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(second, pair));
        }
    }
    for (int row = 0; row < ROWS; row++) {
        _mm256_storeu_si256((__m256i *)sums[row], low[row]);
        _mm256_storeu_si256((__m256i *)(sums[row] + OUTPUTS / 2), high[row]);
    }
}

static void multiply(const int16_t *weights, const int32_t *levels, int64_t n_pairs,
                     int32_t sums[ROWS][OUTPUTS]) {
    for (int quarter = 0; quarter < 4; quarter++) {
        const int16_t *weight = weights + quarter * OUTPUTS / 2;
        const int32_t *level = levels;
        __m128i sum[ROWS];
        for (int row = 0; row < ROWS; row++)
            sum[row] = _mm_setzero_si128();
        for (int64_t i = 0; i < n_pairs; i++, weight += 2 * OUTPUTS, level += ROWS) {
            __m128i of_four = _mm_loadu_si128((const __m128i *)weight);
            for (int row = 0; row < ROWS; row++)
                sum[row] = _mm_add_epi32(
                    sum[row], _mm_madd_epi16(of_four, _mm_set1_epi32(level[row])));
        }
        for (int row = 0; row < ROWS; row++)
            _mm_storeu_si128((__m128i *)(sums[row] + quarter * OUTPUTS / 4), sum[row]);
    }
}
#else
static int has_avx2(void) { return 0; }
#define multiply_avx2 multiply

static void multiply(const int16_t *weights, const int32_t *levels, int64_t n_pairs,
                     int32_t sums[ROWS][OUTPUTS]) {
    memset(sums, 0, ROWS * OUTPUTS * sizeof(int32_t));
    for (int64_t i = 0; i < n_pairs; i++, weights += 2 * OUTPUTS, levels += ROWS)
        for (int row = 0; row < ROWS; row++) {
            int32_t first = (int16_t)(levels[row] & 0xffff), second = levels[row] >> 16;
            for (int output = 0; output < OUTPUTS; output++)
                sums[row][output] +=
                    weights[2 * output] * first + weights[2 * output + 1] * second;
        }
}
#endif

/* Rows of levels, in groups of ROWS: pairs of neighbours, each beside those of the other rows. */
static void pack_levels(const int16_t *levels, int64_t n_rows, int64_t width, int64_t n_inputs,
                        int32_t *packed) {
    int64_t n_pairs = (n_inputs + 1) / 2;
    for (int64_t row = 0; row < n_rows; row++, levels += width) {
        int32_t *to = packed + row / ROWS * n_pairs * ROWS + row % ROWS;
        for (int64_t i = 0; i < n_inputs / 2; i++, to += ROWS)
            *to = (int32_t)((uint32_t)(uint16_t)levels[2 * i] |
                            (uint32_t)(uint16_t)levels[2 * i + 1] << 16);
        if (n_inputs % 2)
            *to = (uint16_t)levels[n_inputs - 1];
    }
}

/* Outputs before the GELU: (n, width) from a column on, -> (n_outputs, n).
 *
 * Weights are in blocks of OUTPUTS outputs, in each by pairs of inputs: (n_inputs + 1) / 2,
 * OUTPUTS, 2. A sum times what it is worth and the bias is rounded to float32 once. */
int first_layer(const int16_t *levels, int64_t n, int64_t width, int64_t column, int64_t n_inputs,
                const int16_t *weights, int64_t n_outputs, const double *worth, const double *bias,
                float *out) {
    int64_t n_pairs = (n_inputs + 1) / 2;
    int32_t *packed = calloc(ROWS_PACKED * n_pairs + 1, sizeof(int32_t));
    int32_t sums[ROWS][OUTPUTS];
    int is_avx2 = has_avx2();
    if (!packed)
        return -1;
    for (int64_t low = 0; low < n; low += ROWS_PACKED) {
        int64_t n_rows = n - low < ROWS_PACKED ? n - low : ROWS_PACKED;
        pack_levels(levels + low * width + column, n_rows, width, n_inputs, packed);
        for (int64_t first = 0; first < n_outputs; first += OUTPUTS)
            for (int64_t group = 0; group < n_rows; group += ROWS) {
                (is_avx2 ? multiply_avx2 : multiply)(weights + first * 2 * n_pairs,
                                                     packed + group * n_pairs, n_pairs, sums);
                for (int64_t i = first; i < n_outputs && i < first + OUTPUTS; i++)
                    for (int64_t row = 0; row < ROWS && group + row < n_rows; row++)
                        out[i * n + low + group + row] =
                            (float)(sums[row][i - first] * worth[i] + bias[i]);
            }
    }
    free(packed);
    return 0;
}

/* Standardised features in whole steps, none beyond the farthest: (n, n_features). */
int levels_of(const float *features, int64_t n, int64_t n_features, const float *mean,
              const float *scale, int64_t farthest, int16_t *levels) {
    const float most = (float)farthest, to_whole = 12582912; /* 1.5 * 2^23: no digit behind it */
    for (int64_t row = 0; row < n; row++, features += n_features, levels += n_features)
        for (int64_t i = 0; i < n_features; i++) {
            float value = (features[i] - mean[i]) * scale[i];
            value = value < -most ? -most : value > most ? most : value;
            levels[i] = (int16_t)((value + to_whole) - to_whole);
        }
    return 0;
}

/* Regions: the chain of host and virus, and repeats */

/* log(exp(a) + exp(b)) */
static double log_sum(double a, double b) {
    return (a > b ? a : b) + log1p(exp(-fabs(a - b)));
}

/* The most probable path: 1 for virus; of two equals the host's. Steps are log-probabilities from
 * each item to the next: host to host, to virus, virus to host, to virus. */
int viterbi(const double *evidence, const double *steps, int64_t n, double host, double virus,
            uint8_t *path) {
    uint8_t state;
    if (!n)
        return 0;
    virus += evidence[0];
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
    return 0;
}

/* The log-odds of each item to be viral, by all items. */
int log_posteriors(const double *evidence, const double *steps, int64_t n, double first,
                   double *odds) {
    double behind = 0;
    if (!n)
        return 0;
    odds[0] = first + evidence[0];
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
    return 0;
}

/* The log-probability of all items over all paths, for each departure of their host's level:
 * contrasts (n,), departures (k,) -> (k,). What a contrast adds for a virus beside a host is
 * per_square * distance * (contrast - departure - distance / 2). */
int log_likelihoods(const double *contrasts, const double *steps, int64_t n,
                    const double *departures, int64_t n_departures, double host_first,
                    double virus_first, double per_square, double distance, double *out) {
    for (int64_t k = 0; k < n_departures; k++) {
        double host = host_first, virus = virus_first, squares = 0;
        for (int64_t i = 0; i < n; i++) {
            const double *step = steps + 4 * (i - 1);
            double value = contrasts[i] - departures[k];
            squares += value * value;
            if (i) {
                double host_before = host;
                host = log_sum(host + step[0], virus + step[2]);
                virus = log_sum(host_before + step[1], virus + step[3]);
            }
            virus += per_square * distance * (value - distance / 2);
        }
        out[k] = log_sum(host, virus) - per_square * squares / 2;
    }
    return 0;
}

/* The words of so many letters as numbers; -1 for one with an unknown letter. */
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

/* Longest common words of at least size letters: place in left, place in right, length.
 *
 * They begin with a word that the left has once or twice; the length is cut at longest. There is
 * room for two rows per letter of the right. */
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
                continue; /* it is part of a longer one */
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

/* How often a text has each of some words of eight letters or more, none on another of its kind. */
int count_words(const uint8_t *text, int64_t n, const uint8_t *words, const int64_t *lengths,
                int64_t n_words, int64_t *counts) {
    const uint64_t multiplier = UINT64_C(0x9E3779B97F4A7C15);
    uint8_t *is_start = calloc(1 << 16, 1); /* by a hash of eight letters */
    int64_t *end = calloc(n_words + 1, sizeof(int64_t));
    const uint8_t *word = words;
    uint64_t eight;
    if (!is_start || !end) {
        free(is_start);
        free(end);
        return -1;
    }
    for (int64_t i = 0; i < n_words; word += lengths[i++]) {
        memcpy(&eight, word, 8);
        is_start[eight * multiplier >> 48] = 1;
        counts[i] = 0;
    }
    for (int64_t place = 0; place + 8 <= n; place++) {
        memcpy(&eight, text + place, 8);
        if (!is_start[eight * multiplier >> 48])
            continue;
        word = words;
        for (int64_t i = 0; i < n_words; word += lengths[i++])
            if (place >= end[i] && place + lengths[i] <= n &&
                memcmp(word, text + place, lengths[i]) == 0) {
                counts[i]++;
                end[i] = place + lengths[i];
            }
    }
    free(is_start);
    free(end);
    return 0;
}
