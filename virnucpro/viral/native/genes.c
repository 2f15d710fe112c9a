/* Find the genes of viruses: open reading frames with a start, chosen by dynamic programming.
 *
 * A gene scores the log-odds of its codons against the codons of the other frames over the same
 * bases, which are learned from the long open reading frames of the sequence itself, plus the
 * log-odds of its start. The best path through all candidates is the result. */

#include "orfs.h"

#include <math.h>
#include <stdlib.h>

enum {
    TRAINED_ON = 100,  /* codons in the shortest open reading frame that the codons come from */
    MOST_STARTS = 6,   /* candidates for each open reading frame */
    N_START_KINDS = 4, /* ATG, GTG, TTG; the edge of the sequence */
    EDGE = 3,
    N_SITES = 4, /* none, three, four, or five and more bases of a ribosome binding site */
    MOST_OVERLAP = 60, /* bases */
    LONGEST_GAP = 30,  /* bases between adjacent genes */
    USUAL_OVERLAP = 4, /* bases: ATGA */
    NEAR = 120         /* bases between neighbours that are looked at one by one */
};

enum { N_ROUNDS = 2, N_SENSE = 61 };

static const double CODING_STEPS = 32; /* of ``coding_codons.py`` per unit */
static const double PRIOR_CODONS = 600, PRIOR_GENES = 15;
static const double MOST_CODON = 1.5; /* log-odds */
/* Log-odds, chosen on phages with the genes of Prodigal, see scripts/weights/measure_genes.py */
static const double GENE = -3.5;
static const double UNKNOWN_CODON = -1; /* no gene runs through a gap */
static const double ADJACENT = 0.7, TURN = -1.5, OVERLAP_PER_BASE = -0.1;
static const double USUAL_START[N_START_KINDS] = {0.6, -0.9, -1.5, 0};
static const double USUAL_SITE[N_SITES] = {-0.6, 0.2, 1.0, 1.8};
/* Shares among all such codons in 60 phages, on both strands, and of sites before any base. */
static const double START_SHARES[EDGE] = {0.34, 0.29, 0.37};
static const double SITE_SHARES[N_SITES] = {0.66, 0.24, 0.08, 0.02};

typedef struct {
    int32_t left, right; /* bases of the gene on the forward strand, half-open */
    int32_t first, end;  /* of its codons, on its strand, without the stop */
    int8_t strand, kind, site, is_open; /* is_open: no stop at the end */
    double codons, score; /* log-odds of the codons, and with the start */
    double best;          /* of the path that ends here */
    int32_t before;       /* candidate before it in the path, or -1 */
} Candidate;

typedef struct {
    Candidate *rows, *path;
    double *prefix[2]; /* best path up to each candidate, by strand of its last gene */
    int32_t *prefix_of[2];
    int64_t n, most;
} List;

typedef struct {
    double codon[N_CODES];
    double start[N_START_KINDS], site[N_SITES];
} Weights;

typedef struct {
    const uint8_t *digits;
    const uint8_t *codes;
    const uint8_t *kind_of_code; /* kind of the start codon, or EDGE for none */
    int32_t length;
} Piece;

static uint8_t code_at(const Piece *piece, int strand, int32_t place) {
    return strand ? other_of(piece->codes[piece->length - 3 - place]) : piece->codes[place];
}

static uint8_t digit_at(const Piece *piece, int strand, int32_t place) {
    return strand ? opposite(piece->digits[piece->length - 1 - place]) : piece->digits[place];
}

static Weights usual_weights(int has_sites) {
    Weights weights = {0};
    memcpy(weights.start, USUAL_START, sizeof weights.start);
    if (has_sites)
        memcpy(weights.site, USUAL_SITE, sizeof weights.site);
    return weights;
}

/* Weights of codons */

/* Number of a codon code, or -1 with an unknown base. */
static int codon_number(int code) {
    int is_codon = code % 5 < 4 && code / 5 % 5 < 4 && code / 25 < 4;
    return is_codon ? 16 * (code / 25) + 4 * (code / 5 % 5) + code % 5 : -1;
}

typedef struct {
    double inside[N_CODES], outside[N_CODES]; /* in genes, and in other frames over the same bases */
    double n_codons;
} CodonCounts;

static void count_codons(const Piece *piece, int strand, int32_t start, int32_t end,
                         CodonCounts *counts) {
    counts->n_codons += (end - start) / 3;
    for (int32_t place = start; place < end; place += 3)
        counts->inside[code_at(piece, strand, place)]++;
    for (int32_t place = start; place + 3 <= end; place++) {
        uint8_t code = code_at(piece, strand, place);
        counts->outside[code] += (place - start) % 3 != 0;
        counts->outside[other_of(code)]++;
    }
}

/* Learn the log-odds of codons from the sequence; the fewer codons, the more the usual ones
 * count. */
static void learn_codons(CodonCounts *counts, const uint8_t *is_stop, Weights *weights) {
    double n_in = 0, n_out = 0, share = counts->n_codons / (counts->n_codons + PRIOR_CODONS);
    for (int code = 0; code < N_CODES; code++) {
        if (codon_number(code) < 0 || is_stop[code])
            counts->inside[code] = counts->outside[code] = 0;
        n_in += counts->inside[code];
        n_out += counts->outside[code];
    }
    for (int code = 0; code < N_CODES; code++) {
        weights->codon[code] = UNKNOWN_CODON;
        if (codon_number(code) < 0 || is_stop[code])
            continue;
        double usual = vnp_coding_weight(codon_number(code)) / CODING_STEPS, own = 0;
        if (n_in > 0)
            own = log((counts->inside[code] + 1) / (n_in + N_SENSE)) -
                  log((counts->outside[code] + 1) / (n_out + N_SENSE));
        double value = share * own + (1 - share) * usual;
        weights->codon[code] = value > MOST_CODON    ? MOST_CODON
                               : value < -MOST_CODON ? -MOST_CODON
                                                     : value;
    }
}

/* Count the codons of the long reading frames that longer ones hardly cover. */
static void count_in_stretches(const Piece *piece, const Room *room, CodonCounts *counts) {
    for (int64_t rank = 0; rank < room->n_kept; rank++) {
        const Stretch *stretch = room->kept + rank;
        if (stretch->n_codons >= TRAINED_ON)
            count_codons(piece, stretch->strand, stretch->start,
                         stretch->start + 3 * stretch->n_codons, counts);
    }
}

/* Starts */

/* Bases of the longest part of AGGAGG (one G may be A) that ends 3 to 14 bases before a start. */
static int binding_site(const Piece *piece, int strand, int32_t start) {
    static const uint8_t site[6] = {0, 2, 2, 0, 2, 2};
    int longest = 0;
    for (int32_t first = start - 20; first + 3 <= start - 3; first++) {
        if (first < 0)
            continue;
        for (int offset = 0; offset < 4; offset++) {
            int n = 0;
            while (offset + n < 6 && first + n < start - 3 &&
                   digit_at(piece, strand, first + n) == site[offset + n])
                n++;
            int32_t gap = start - first - n;
            if (n > longest && gap <= 13)
                longest = n;
        }
    }
    return longest < 3 ? 0 : longest > 5 ? 3 : longest - 2;
}

/* Candidates */

static void close_list(List *list) {
    free(list->rows);
    free(list->path);
    for (int strand = 0; strand < 2; strand++) {
        free(list->prefix[strand]);
        free(list->prefix_of[strand]);
    }
}

static int grow_list(List *list) {
    int64_t most = 2 * list->most + 64;
    Candidate *rows = realloc(list->rows, most * sizeof(Candidate));
    if (!rows)
        return -1;
    list->rows = rows;
    Candidate *path = realloc(list->path, most * sizeof(Candidate));
    if (!path)
        return -1;
    list->path = path;
    list->most = most;
    return 0;
}

static double score_of(const Candidate *candidate, const Weights *weights) {
    double start = weights->start[candidate->kind];
    if (candidate->kind != EDGE)
        start += weights->site[candidate->site];
    return candidate->codons + start + GENE;
}

/* Add the best starts of an open reading frame on a strand. */
static int add_starts(const Piece *piece, int strand, int32_t first, int32_t end, int is_open,
                      int is_edge, int32_t shortest, int has_sites, const Weights *weights,
                      List *list) {
    Candidate best[MOST_STARTS];
    int n_best = 0;
    double sum = 0;
    for (int32_t place = end - 3; place >= first; place -= 3) {
        uint8_t code = code_at(piece, strand, place);
        int kind = piece->kind_of_code[code];
        sum += weights->codon[code];
        int32_t n_codons = (end - place) / 3;
        int is_first = place == first;
        if (kind == EDGE && !(is_first && is_edge))
            continue;
        if (n_codons < (is_open || (is_edge && is_first) ? 2 * shortest / 3 : shortest))
            continue;
        Candidate one = {0};
        one.strand = strand;
        one.first = place;
        one.end = end;
        one.is_open = is_open;
        one.kind = is_first && is_edge && kind == EDGE ? EDGE : kind;
        one.codons = sum;
        one.site = has_sites && one.kind != EDGE ? binding_site(piece, strand, place) : 0;
        one.score = score_of(&one, weights);
        int32_t stop = is_open ? 0 : 3;
        one.left = strand ? piece->length - end - stop : place;
        one.right = strand ? piece->length - place : end + stop;
        if (n_best == MOST_STARTS && best[MOST_STARTS - 1].score >= one.score)
            continue;
        int rank = n_best < MOST_STARTS ? n_best++ : MOST_STARTS - 1;
        while (rank > 0 && best[rank - 1].score < one.score) {
            best[rank] = best[rank - 1];
            rank--;
        }
        best[rank] = one;
    }
    for (int i = 0; i < n_best; i++) {
        if (best[i].score < 0)
            break;
        if (list->n == list->most && grow_list(list))
            return -1;
        list->rows[list->n++] = best[i];
    }
    return 0;
}

/* Find the candidates of all open reading frames. */
static int find_candidates(const Piece *piece, const uint8_t *is_stop, int32_t shortest,
                           int has_sites, const Weights *weights, List *list) {
    list->n = 0;
    for (int strand = 0; strand < 2; strand++)
        for (int32_t frame = 0; frame < 3; frame++) {
            int32_t first = frame, place = frame;
            for (; place + 3 <= piece->length; place += 3) {
                if (!is_stop[code_at(piece, strand, place)])
                    continue;
                if (place - first >= 2 * shortest &&
                    add_starts(piece, strand, first, place, 0, first == frame, shortest, has_sites,
                               weights, list))
                    return -1;
                first = place + 3;
            }
            if (place - first >= 2 * shortest &&
                add_starts(piece, strand, first, place, 1, first == frame, shortest, has_sites,
                           weights, list))
                return -1;
        }
    return 0;
}

/* The best path */

static int by_right(const void *a, const void *b) {
    const Candidate *one = a, *other = b;
    if (one->right != other->right)
        return one->right < other->right ? -1 : 1;
    if (one->left != other->left)
        return one->left < other->left ? -1 : 1;
    return one->strand - other->strand;
}

/* Index of the first candidate whose right end is above a base. */
static int64_t first_above(const List *list, int32_t base) {
    int64_t low = 0, high = list->n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (list->rows[middle].right > base)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The log-odds of two neighbours, or -INFINITY if they cannot follow each other. */
static double link_of(const Candidate *one, const Candidate *next) {
    int32_t overlap = one->right - next->left;
    int is_turn = one->strand != next->strand;
    if (overlap > MOST_OVERLAP || one->left >= next->left || one->right >= next->right)
        return -INFINITY;
    int32_t shorter = one->right - one->left < next->right - next->left ? one->right - one->left
                                                                        : next->right - next->left;
    if (2 * overlap > shorter)
        return -INFINITY;
    double link = is_turn ? TURN : overlap > -LONGEST_GAP ? ADJACENT : 0;
    int32_t usual = is_turn ? 0 : USUAL_OVERLAP;
    return overlap > usual ? link + OVERLAP_PER_BASE * (overlap - usual) : link;
}

static void find_path(List *list) {
    if (list->n > 1) /* without candidates there are no rows */
        qsort(list->rows, list->n, sizeof(Candidate), by_right);
    for (int64_t i = 0; i < list->n; i++) {
        Candidate *one = list->rows + i;
        int64_t near = first_above(list, one->left - NEAR);
        one->best = 0;
        one->before = -1;
        for (int strand = 0; strand < 2 && near > 0; strand++) {
            double link = strand == one->strand ? 0 : TURN;
            if (list->prefix[strand][near - 1] + link > one->best) {
                one->best = list->prefix[strand][near - 1] + link;
                one->before = list->prefix_of[strand][near - 1];
            }
        }
        for (int64_t j = near; j < i; j++) {
            double value = list->rows[j].best + link_of(list->rows + j, one);
            if (value > one->best) {
                one->best = value;
                one->before = (int32_t)j;
            }
        }
        one->best += one->score;
        for (int strand = 0; strand < 2; strand++) {
            double earlier = i ? list->prefix[strand][i - 1] : -INFINITY;
            int is_better = strand == one->strand && one->best > earlier;
            list->prefix[strand][i] = is_better ? one->best : earlier;
            list->prefix_of[strand][i] = is_better ? (int32_t)i
                                         : i       ? list->prefix_of[strand][i - 1]
                                                   : -1;
        }
    }
}

static int open_prefix(List *list) {
    size_t n = list->n + 1;
    for (int strand = 0; strand < 2; strand++) {
        double *prefix = realloc(list->prefix[strand], n * sizeof(double));
        if (!prefix)
            return -1;
        list->prefix[strand] = prefix;
        int32_t *prefix_of = realloc(list->prefix_of[strand], n * sizeof(int32_t));
        if (!prefix_of)
            return -1;
        list->prefix_of[strand] = prefix_of;
    }
    return 0;
}

/* Keep the candidates of the best path, in order. Their number. */
static int64_t follow_path(List *list) {
    int64_t last = -1, n = 0;
    for (int64_t i = 0; i < list->n; i++)
        if (list->rows[i].best > 0 && (last < 0 || list->rows[i].best > list->rows[last].best))
            last = i;
    for (int64_t i = last; i >= 0; i = list->rows[i].before)
        n++;
    int64_t rank = n;
    for (int64_t i = last; i >= 0;) {
        int32_t before = list->rows[i].before;
        list->path[--rank] = list->rows[i];
        i = before;
    }
    return n;
}

/* Learn how often the genes of the path begin with each codon and binding site, compared with the
 * other starts. */
static void learn_starts(const List *list, int64_t n_genes, int has_sites, const Weights *usual,
                         Weights *weights) {
    double starts[N_START_KINDS] = {0}, sites[N_SITES] = {0}, n = 0;
    for (int64_t i = 0; i < n_genes; i++) {
        const Candidate *gene = list->path + i;
        if (gene->kind == EDGE || gene->end - gene->first < 3 * TRAINED_ON)
            continue;
        starts[gene->kind]++;
        sites[gene->site]++;
        n++;
    }
    double share = n / (n + PRIOR_GENES);
    for (int kind = 0; kind < EDGE; kind++) {
        double own = log((starts[kind] + 0.5) / (n + 1.5)) - log(START_SHARES[kind]);
        weights->start[kind] = share * own + (1 - share) * usual->start[kind];
    }
    for (int site = 0; has_sites && site < N_SITES; site++) {
        double own = log((sites[site] + 0.5) / (n + 2)) - log(SITE_SHARES[site]);
        weights->site[site] = share * own + (1 - share) * usual->site[site];
    }
}

static int genes_of(const Piece *piece, const Room *room, const uint8_t *is_stop,
                    int32_t shortest, int has_sites, const Weights *usual, List *list,
                    int64_t *n_genes) {
    Weights weights = *usual;
    CodonCounts counts = {0};
    count_in_stretches(piece, room, &counts);
    learn_codons(&counts, is_stop, &weights);
    *n_genes = 0;
    for (int round = 0; round < N_ROUNDS; round++) {
        if (round)
            learn_starts(list, *n_genes, has_sites, usual, &weights);
        if (find_candidates(piece, is_stop, shortest, has_sites, &weights, list) ||
            open_prefix(list))
            return -1;
        find_path(list);
        *n_genes = follow_path(list);
    }
    return 0;
}

/* The genes of each piece, in order: their number, and for each the strand, its first base and one
 * past its last on the forward strand, whether its start is missing and whether its end is, and the
 * log-odds.
 *
 * kind_of_code: (2, N_CODES), for pieces without and with binding sites. The caller allocates one
 * row per 30 bases of each piece, and two. */
int find_genes(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
               const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
               const int64_t *starts, const int64_t *lengths, int64_t n, const uint8_t *is_stop,
               const uint8_t *kind_of_code, const uint8_t *has_sites, int64_t shortest,
               int64_t *n_genes, int64_t *rows, double *scores) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    Room room = {0};
    List list = {0};
    int result = vnp_open_room(&room, longest_of(lengths, n));
    for (int64_t i = 0; result == 0 && i < n; i++) {
        Piece piece = {digits + starts[i], codes + starts[i], kind_of_code + has_sites[i] * N_CODES,
                       (int32_t)lengths[i]};
        Weights usual = usual_weights(has_sites[i]);
        vnp_find_stretches(&bases, starts[i], piece.length, (int32_t)shortest, &room);
        result = genes_of(&piece, &room, is_stop, (int32_t)shortest, has_sites[i], &usual, &list,
                          n_genes + i);
        for (int64_t rank = 0; result == 0 && rank < n_genes[i]; rank++) {
            const Candidate *gene = list.path + rank;
            *rows++ = gene->strand;
            *rows++ = gene->left;
            *rows++ = gene->right;
            *rows++ = gene->kind == EDGE;
            *rows++ = gene->is_open;
            *scores++ = gene->score;
        }
    }
    vnp_close_room(&room);
    close_list(&list);
    return result;
}
