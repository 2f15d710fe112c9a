/* Compute the features of pieces of sequences in one pass, and of proteins. */

#include "features.h"

#include <math.h>
#include <stdlib.h>

enum {
    SHORTEST = 5, /* codons of a stretch */
    LONG = 20,
    MOST_STRETCHES = 6
};

static const float LEAST_GC = 0.05F, MOST_GC = 0.95F;

/* Tables of one genetic code, indexed by the code of a codon. */
typedef struct {
    const uint8_t *is_stop;
    const uint8_t *synonym; /* the codon that it counts as */
    const uint8_t *residue; /* N_RESIDUES: none */
} Code;

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

static inline int32_t more_of(int32_t a, int32_t b) { return a > b ? a : b; }

/* Count the codons and junctions of a stretch, and the pairs of residues of the longest one. The
 * numbers are copied, so that they stay in registers. */
static void count_stretch(const Tables *tables, const uint8_t *code, const Stretch *stretch,
                          int is_longest, Tally *tally) {
    int strand = stretch->strand;
    int64_t step = strand ? -3 : 3;
    const uint8_t *codes = tables->codes[strand], *numbers = tables->numbers[strand];
    const uint8_t *residues = tables->residues[strand];
    uint16_t *met_two = tally->met[0], *met_one = tally->met[1], *met_pair = tally->met[2];
    int32_t n_junctions = tally->n_junctions, most_junctions = tally->most_junctions;
    int32_t n_pairs = tally->n_pairs, most_pairs = tally->most_pairs;
    int left = N_CODONS, before = N_RESIDUES;
    for (int32_t i = 0; i < stretch->n_codons; i++, code += step) {
        int right = numbers[*code];
        tally->long_codes[codes[*code]]++;
        if (left < N_CODONS && right < N_CODONS) {
            int two = (left & 15) * 16 + (right >> 2), one = (left & 3) * 64 + right;
            most_junctions = more_of(most_junctions, ++tally->junctions[0][two]);
            most_junctions = more_of(most_junctions, ++tally->junctions[1][one]);
            met_two[n_junctions] = (uint16_t)two;
            met_one[n_junctions++] = (uint16_t)one;
        }
        left = right;
        if (!is_longest)
            continue;
        int residue = residues[*code];
        if (before < N_RESIDUES && residue < N_RESIDUES) {
            int pair = before * N_RESIDUES + residue;
            most_pairs = more_of(most_pairs, ++tally->pairs[pair]);
            met_pair[n_pairs++] = (uint16_t)pair;
        }
        before = residue;
    }
    tally->n_junctions = n_junctions;
    tally->most_junctions = most_junctions;
    tally->n_pairs = n_pairs;
    tally->most_pairs = most_pairs;
}

/* Count the k-mers that another piece has looked up already, and list the others. */
static void find_kmers(const Bases *bases, const Tables *tables, const KmerTable *kmers,
                       const uint8_t *code, const Stretch *stretch, Tally *tally) {
    enum { THREE = N_RESIDUES * N_RESIDUES * N_RESIDUES };
    int strand = stretch->strand, n_known = 0, first = 0, second = 0;
    int64_t step = strand ? -3 : 3, n_unknown = tally->n_unknown, n_kmers = 0;
    const uint8_t *residues = tables->residues[strand];
    uint8_t *class = tally->known + 2 * (code - bases->codes) + strand;
    uint16_t *threes = tally->threes;
    for (int32_t i = 0; i < stretch->n_codons; i++, code += step, class += 2 * step) {
        int third = residues[*code];
        threes[i] = (uint16_t)((first * N_RESIDUES + second) * N_RESIDUES + third);
        first = second;
        second = third;
        n_known = third < N_RESIDUES ? n_known + 1 : 0;
        if (n_known < KMER)
            continue;
        n_kmers++;
        if (*class < N_KMER_CLASSES) {
            tally->classes[*class]++;
            continue;
        }
        tally->at[n_unknown] = class;
        tally->hashes[n_unknown++] =
            hash_to_find(kmers,
                         ((int64_t)threes[i - 6] * THREE + threes[i - 3]) * THREE + threes[i]);
    }
    tally->n_unknown = n_unknown;
    tally->n_kmers += n_kmers;
}

static void count_codons(const Bases *bases, const Tables *tables, const KmerTable *kmers,
                         int64_t from, int32_t length, const Room *room, Tally *tally) {
    clear(tally->long_codes, sizeof tally->long_codes);
    clear(tally->longest_codes, sizeof tally->longest_codes);
    clear(tally->classes, sizeof tally->classes);
    tally->n_junctions = tally->most_junctions = tally->n_pairs = tally->most_pairs = 0;
    tally->n_kmers = tally->n_unknown = 0;
    for (int64_t rank = 0; rank < room->n_kept && rank < MOST_STRETCHES; rank++) {
        const Stretch *stretch = room->kept + rank;
        const uint8_t *code = bases->codes + from;
        code += stretch->strand ? length - 3 - stretch->start : stretch->start;
        if (rank && stretch->n_codons < LONG)
            break;
        count_stretch(tables, code, stretch, rank == 0, tally);
        if (kmers->n_entries)
            find_kmers(bases, tables, kmers, code, stretch, tally);
        if (rank == 0)
            memcpy(tally->longest_codes, tally->long_codes, sizeof tally->long_codes);
    }
    vnp_classes_of_hashes(kmers, tally->hashes, tally->n_unknown, tally->found);
    for (int64_t i = 0; i < tally->n_unknown; i++) {
        tally->classes[tally->found[i]]++;
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
    for (int kmer = 0; kmer < 16; kmer++) {
        int is_strong = kmer >> 2 == 1 || kmer >> 2 == 2;
        int is_next = (kmer & 3) == 1 || (kmer & 3) == 2;
        n_fours += tally->fours[kmer];
        out[kmer] = (float)(log_of(LOG_HALF, tally->fours[kmer]) - expected[is_strong][is_next]);
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
    vnp_sort_by_place(room->kept, n_long);
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

static void write_classes(const Tally *tally, float *out) {
    double n_kmers = larger(1, (double)tally->n_kmers);
    for (int class = 1; class < N_KMER_CLASSES; class++) {
        double n = tally->classes[class];
        if (class == ONE_VIRAL || class == ONE_CELLULAR)
            n *= RARITY;
        out[class - 1] = (float)sqrt(n / n_kmers);
    }
}

void vnp_close_reader(Reader *reader) {
    close_tally(&reader->tally);
    vnp_close_room(&reader->room);
    free(reader->roots);
}

int vnp_open_reader(Reader *reader, const Bases *bases, const int64_t *lengths, int64_t n,
                       const uint8_t *code_tables, const KmerTable *kmers, uint8_t *classes) {
    Code code = {code_tables, code_tables + N_CODES, code_tables + 2 * N_CODES};
    int64_t longest = longest_of(lengths, n);
    int64_t most = MOST_STRETCHES * (longest / 3 + 1) + longest; /* no count exceeds it */
    reader->bases = *bases;
    reader->kmers = *kmers;
    reader->tally.known = classes;
    reader->roots = malloc((most + 1) * sizeof(float));
    open_tables(&reader->tables, &code);
    if (!reader->roots || vnp_open_room(&reader->room, longest) ||
        open_tally(&reader->tally, longest))
        return -1;
    return 0;
}

uint8_t vnp_read_piece(Reader *reader, int64_t from, int32_t length, float *out) {
    const Bases *bases = &reader->bases;
    const Tables *tables = &reader->tables;
    Room *room = &reader->room;
    Tally *tally = &reader->tally;
    float *roots = reader->roots;
    float *longest = out, *long_ones = out + N_CODONS, *junctions = out + 2 * N_CODONS;
    float *pairs = junctions + 2 * N_JUNCTIONS, *palindromes = pairs + N_PAIRS;
    float *figures = palindromes + N_PALINDROMES, *classes = figures + N_FIGURES;
    float *ratios = classes + N_KMER_CLASSES - 1;
    double n_bases = (double)at_least(1, length);
    vnp_find_stretches(bases, from, length, SHORTEST, room);
    count_codons(bases, tables, &reader->kmers, from, length, room, tally);
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
    write_classes(tally, classes);
    write_codons(tables, tally->longest_codes, figures[0], roots, longest, ratios);
    write_codons(tables, tally->long_codes, figures[0], roots, long_ones, ratios + N_CODONS);
    return tally->bases[0] + tally->bases[1] + tally->bases[2] + tally->bases[3] == 0;
}

int piece_features(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                   const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                   const int64_t *starts, const int64_t *lengths, int64_t n,
                   const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                   const int32_t *first, const uint16_t *entries, int64_t n_entries,
                   uint8_t *classes, float *out, uint8_t *is_blank) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    KmerTable kmers = {hints, n_of_bucket, first, entries, n_entries};
    Reader reader = {0};
    int result = vnp_open_reader(&reader, &bases, lengths, n, code_tables, &kmers, classes);
    for (int64_t i = 0; result == 0 && i < n; i++)
        is_blank[i] = vnp_read_piece(&reader, starts[i], (int32_t)lengths[i], out + i * N_FEATURES);
    vnp_close_reader(&reader);
    return result;
}

/* The means of the first `width` features over the pieces of each row: (n_rows,) -> (n_rows,
 * width). A row has n_pieces consecutive pieces. NaN where no piece has a known base. */
int mean_features(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                  const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                  const int64_t *starts, const int64_t *lengths, int64_t n,
                  const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                  const int32_t *first, const uint16_t *entries, int64_t n_entries,
                  uint8_t *classes, const int64_t *n_pieces, int64_t n_rows, int64_t width,
                  double *means) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    KmerTable kmers = {hints, n_of_bucket, first, entries, n_entries};
    float features[N_FEATURES];
    Reader reader = {0};
    int result = vnp_open_reader(&reader, &bases, lengths, n, code_tables, &kmers, classes);
    for (int64_t row = 0, i = 0; result == 0 && row < n_rows; row++, means += width) {
        int64_t end = i + n_pieces[row], n_known = 0;
        clear(means, width * sizeof(double));
        for (; i < end; i++) {
            if (vnp_read_piece(&reader, starts[i], (int32_t)lengths[i], features))
                continue;
            n_known++;
            for (int64_t j = 0; j < width; j++)
                means[j] += nearest(features[j] * STEPS); /* whole: in any order the same sum */
        }
        for (int64_t j = 0; j < width; j++)
            means[j] = n_known ? means[j] / (STEPS * n_known) : NAN;
    }
    vnp_close_reader(&reader);
    return result;
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

/* Count the residues of each protein, and compute figures of its windows. A residue has two values,
 * and a window their sums. For each value: the largest and the smallest sum, 0 without a window.
 * Then the number of windows with a first sum above `least`, and that of simple windows, which
 * have few different residues. (n_values, 2) -> (n, 6), (n, N_RESIDUES + 1) */
int protein_windows(const uint8_t *residues, const int64_t *lengths, int64_t n,
                    const int64_t *values, int64_t size, int64_t least, int64_t size_of_simple,
                    int64_t few, int64_t *out, int64_t *counts) {
    for (int64_t protein = 0; protein < n; residues += lengths[protein++]) {
        int64_t sums[2] = {0}, n_of[N_RESIDUES + 1] = {0}, n_different = 0;
        clear(out, 6 * sizeof(int64_t));
        clear(counts, (N_RESIDUES + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < lengths[protein]; i++) {
            counts[residues[i]]++;
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
        out += 6;
        counts += N_RESIDUES + 1;
    }
    return 0;
}

/* Roots of the shares of each class among the k-mers of a protein. */
static void write_classes_of_protein(const uint8_t *residues, int64_t length,
                                     const KmerTable *kmers, uint64_t *hashes, uint8_t *classes,
                                     float *out) {
    int64_t number = 0, most = 1, n_known = 0, n_kmers = 0, counts[N_KMER_CLASSES] = {0};
    for (int i = 1; i < KMER; i++)
        most *= N_RESIDUES;
    for (int64_t i = 0; i < length; i++) {
        n_known = residues[i] < N_RESIDUES ? n_known + 1 : 0;
        number = n_known ? number % most * N_RESIDUES + residues[i] : 0;
        if (n_known >= KMER)
            hashes[n_kmers++] = hash_to_find(kmers, number);
    }
    vnp_classes_of_hashes(kmers, hashes, n_kmers, classes);
    for (int64_t i = 0; i < n_kmers; i++)
        counts[classes[i]]++;
    counts[ONE_VIRAL] *= RARITY;
    counts[ONE_CELLULAR] *= RARITY;
    for (int class = 1; class < N_KMER_CLASSES; class++)
        out[class - 1] = (float)sqrt((double)counts[class] / (double)at_least(1, n_kmers));
}

/* Figures of the log ratios of a pattern in a protein: their mean, the mean of the positive ones
 * over all, and the root of the mean square. Inlined, because the places are constants there. */
static inline __attribute__((always_inline)) void
write_pattern(const uint8_t *residues, int64_t length, const int *places, int n_places,
              const int8_t *ratios, double step, float *out) {
    int64_t sum = 0, rises = 0, squares = 0, n = 0;
    for (int64_t i = 0; i + places[n_places - 1] < length; i++) {
        uint32_t number = 0;
        int32_t ratio, is_known = 1;
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

static void write_patterns(const uint8_t *residues, int64_t length, const int8_t *const *ratios,
                           double step, float *out) {
    write_pattern(residues, length, PATTERNS[0], 3, ratios[0], step, out);
    write_pattern(residues, length, PATTERNS[1], 4, ratios[1], step, out + 3);
    write_pattern(residues, length, PATTERNS[2], 4, ratios[2], step, out + 6);
    write_pattern(residues, length, PATTERNS[3], 4, ratios[3], step, out + 9);
}

/* What proteins share with viruses and cells: figures of k-mers and of each pattern. (n, 18) */
int protein_shared(const uint8_t *residues, const int64_t *lengths, int64_t n,
                   const uint8_t *hints, const uint8_t *n_of_bucket, const int32_t *first,
                   const uint16_t *entries, int64_t n_entries, const int8_t *ratios_0,
                   const int8_t *ratios_1, const int8_t *ratios_2, const int8_t *ratios_3,
                   double step, float *out) {
    const int8_t *ratios[N_PATTERNS] = {ratios_0, ratios_1, ratios_2, ratios_3};
    KmerTable kmers = {hints, n_of_bucket, first, entries, n_entries};
    int64_t longest = longest_of(lengths, n);
    uint64_t *hashes = malloc((longest + 1) * sizeof(uint64_t));
    uint8_t *classes = malloc(longest + 1);
    if (!hashes || !classes) {
        free(hashes);
        free(classes);
        return -1;
    }
    for (int64_t i = 0; i < n; residues += lengths[i++]) {
        write_classes_of_protein(residues, lengths[i], &kmers, hashes, classes, out);
        out += N_KMER_CLASSES - 1;
        write_patterns(residues, lengths[i], ratios, step, out);
        out += 3 * N_PATTERNS;
    }
    free(hashes);
    free(classes);
    return 0;
}
