/* Read bases, and find the open reading frames of pieces: stretches between stop codons. */

#include "orfs.h"

#include <math.h>
#include <stdlib.h>

enum {
    GENE = 60,    /* codons */
    ABUTTING = 60 /* bases */
};

static const double MOST_COVERED = 0.3 * 3; /* bases of a codon */
static const double LEAST_GAP = -200, MOST_GAP = 2000;

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

int vnp_coding_weight(int number) { return CODING[number]; }

static int n_bits_of(uint64_t bits) {
    bits -= (bits >> 1) & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + ((bits >> 2) & UINT64_C(0x3333333333333333));
    bits = (bits + (bits >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int)((bits * UINT64_C(0x0101010101010101)) >> 56);
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

void vnp_close_room(Room *room) {
    for (int row = 0; row < 6; row++)
        free(room->rows[row]);
    free(room->sorted);
    free(room->kept);
    free(room->n_of_length);
    free(room->covered);
}

int vnp_open_room(Room *room, int64_t longest) {
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
    room->end_stop[strand] = end;
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

void vnp_find_stretches(const Bases *bases, int64_t from, int32_t length, int32_t shortest,
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

void vnp_sort_by_place(Stretch *stretches, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        Stretch one = stretches[i];
        int64_t place = i;
        for (; place > 0 && stretches[place - 1].first > one.first; place--)
            stretches[place] = stretches[place - 1];
        stretches[place] = one;
    }
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
    int result = vnp_open_room(&room, longest_of(lengths, n));
    for (int64_t i = 0; result == 0 && i < n; i++) {
        vnp_find_stretches(&bases, starts[i], (int32_t)lengths[i], (int32_t)shortest, &room);
        n_kept[i] = room.n_kept;
        for (int64_t rank = 0; rank < room.n_kept; rank++) {
            *rows++ = room.kept[rank].strand;
            *rows++ = room.kept[rank].start;
            *rows++ = room.kept[rank].n_codons;
        }
    }
    vnp_close_room(&room);
    return result;
}

/* The layout of the gene-like stretches of a piece. */
static void write_layout(Room *room, double kilobases, double *out) {
    const Stretch *kept = room->kept;
    int64_t n = room->n_kept, n_genes = 0, n_reverse = 0, n_switches = 0, n_short = 0;
    double total = 0, squares = 0, of_genes = 0, gaps = 0;
    double middle = n ? kept[(n - 1) / 2].n_codons : 0, longest = n ? kept[0].n_codons : 0;
    int32_t strand = -1;
    vnp_sort_by_place(room->kept, n);
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
    int result = vnp_open_room(&room, longest_of(lengths, n));
    for (int64_t i = 0; result == 0 && i < n; i++) {
        vnp_find_stretches(&bases, starts[i], (int32_t)lengths[i], GENE_LIKE, &room);
        write_layout(&room, at_least(1, lengths[i]) / 1000.0, out + i * N_LAYOUT);
    }
    vnp_close_room(&room);
    return result;
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
