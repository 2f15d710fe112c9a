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
    NOT_READ = -1,
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
    int8_t strand, kind, site, is_open; /* is_open: no stop at the end */
    int32_t n_codons;                   /* without the stop */
    int32_t before;                     /* candidate before it in the path, or -1 */
    double score, best;                 /* log-odds, and those of the path that ends here */
} Candidate;

/* An open reading frame, whose possible starts are neighbours in a list, the last one first. */
typedef struct {
    int64_t first_start, n_starts;
    int32_t end; /* of its codons, on its strand, without the stop */
    int8_t strand, is_open;
} Frame;

typedef struct {
    double codons; /* log-odds of the codons from here to the end of the frame */
    int32_t place; /* first base, on its strand */
    int8_t kind, site; /* site: NOT_READ until it is needed */
} Start;

typedef struct {
    Frame *frames;
    Start *starts;
    int64_t n_frames, n_starts, most_frames, most_starts;
    Candidate *rows, *path;
    double *prefix[2]; /* best path up to each candidate, by strand of its last gene */
    int32_t *prefix_of[2];
    int64_t n, most;
} List;

typedef struct {
    double codon[N_CODES];
    double start[N_START_KINDS], site[N_SITES];
} Weights;

/* Weights and kinds of starts, by strand and code of the forward strand. */
typedef struct {
    double weights[2][N_CODES];
    uint8_t kinds[2][N_CODES];
} CodonTables;

typedef struct {
    const uint8_t *digits;
    const uint8_t *codes;
    const uint8_t *kind_of_code; /* kind of the start codon, or EDGE for none */
    int32_t length, has_sites;
} Piece;

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

/* Codons on the forward strand that genes on each strand cover: in the frame of the gene or its
 * opposite, and in the other frames. */
typedef struct {
    int64_t in_frame[2][N_CODES], off_frame[2][N_CODES];
    int64_t n_codons;
} CodonCounts;

static void count_codons(const Piece *piece, const Stretch *stretch, CodonCounts *counts) {
    const uint8_t *code = piece->codes + stretch->first;
    const uint8_t *last = code + 3 * (stretch->n_codons - 1);
    int64_t *in_frame = counts->in_frame[stretch->strand];
    int64_t *off_frame = counts->off_frame[stretch->strand];
    counts->n_codons += stretch->n_codons;
    for (; code < last; code += 3) {
        in_frame[code[0]]++;
        off_frame[code[1]]++;
        off_frame[code[2]]++;
    }
    in_frame[*last]++;
}

static double n_inside(const CodonCounts *counts, int code) {
    return (double)(counts->in_frame[0][code] + counts->in_frame[1][other_of(code)]);
}

/* How often a codon occurs in the five other frames over the same bases. */
static double n_outside(const CodonCounts *counts, int code) {
    int other = other_of(code);
    int64_t n_off = counts->off_frame[0][code] + counts->off_frame[1][other];
    int64_t n_opposite_off = counts->off_frame[0][other] + counts->off_frame[1][code];
    int64_t n_opposite_in = counts->in_frame[0][other] + counts->in_frame[1][code];
    return (double)(n_off + n_opposite_off + n_opposite_in);
}

/* Learn the log-odds of codons from the sequence; the fewer codons, the more the usual ones
 * count. */
static void learn_codons(const CodonCounts *counts, const uint8_t *is_stop, Weights *weights) {
    double n_codons = (double)counts->n_codons, n_in = 0, n_out = 0;
    double share = n_codons / (n_codons + PRIOR_CODONS);
    for (int code = 0; code < N_CODES; code++) {
        if (codon_number(code) < 0 || is_stop[code])
            continue;
        n_in += n_inside(counts, code);
        n_out += n_outside(counts, code);
    }
    for (int code = 0; code < N_CODES; code++) {
        weights->codon[code] = UNKNOWN_CODON;
        if (codon_number(code) < 0 || is_stop[code])
            continue;
        double usual = vnp_coding_weight(codon_number(code)) / CODING_STEPS, own = 0;
        if (n_in > 0)
            own = log((n_inside(counts, code) + 1) / (n_in + N_SENSE)) -
                  log((n_outside(counts, code) + 1) / (n_out + N_SENSE));
        double value = share * own + (1 - share) * usual;
        weights->codon[code] = value > MOST_CODON    ? MOST_CODON
                               : value < -MOST_CODON ? -MOST_CODON
                                                     : value;
    }
}

/* Count the codons of the long reading frames that longer ones hardly cover. */
static void count_in_stretches(const Piece *piece, const Room *room, CodonCounts *counts) {
    for (int64_t rank = 0; rank < room->n_kept; rank++)
        if (room->kept[rank].n_codons >= TRAINED_ON)
            count_codons(piece, room->kept + rank, counts);
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

/* Open reading frames and their starts */

static void close_list(List *list) {
    free(list->frames);
    free(list->starts);
    free(list->rows);
    free(list->path);
    for (int strand = 0; strand < 2; strand++) {
        free(list->prefix[strand]);
        free(list->prefix_of[strand]);
    }
}

/* Double an array of `most` values, each of some bytes. NULL if memory runs out. */
static void *grow(void *values, int64_t *most, size_t n_bytes) {
    int64_t n = 2 * *most + 64;
    void *room = realloc(values, n * n_bytes);
    if (room)
        *most = n;
    return room;
}

static int add_start(List *list, int32_t place, int kind, double codons) {
    if (list->n_starts == list->most_starts) {
        Start *starts = grow(list->starts, &list->most_starts, sizeof(Start));
        if (!starts)
            return -1;
        list->starts = starts;
    }
    Start start = {codons, place, (int8_t)kind, NOT_READ};
    list->starts[list->n_starts++] = start;
    return 0;
}

static int add_frame(List *list, const Frame *frame) {
    if (list->n_frames == list->most_frames) {
        Frame *frames = grow(list->frames, &list->most_frames, sizeof(Frame));
        if (!frames)
            return -1;
        list->frames = frames;
    }
    list->frames[list->n_frames++] = *frame;
    return 0;
}

static void fill_tables(const uint8_t *kind_of_code, const double *codon_weights,
                        CodonTables *tables) {
    for (int code = 0; code < N_CODES; code++) {
        int other = other_of(code);
        tables->weights[0][code] = codon_weights[code];
        tables->weights[1][code] = codon_weights[other];
        tables->kinds[0][code] = kind_of_code[code];
        tables->kinds[1][code] = kind_of_code[other];
    }
}

/* List an open reading frame, with its starts. is_edge: it begins at the edge of the piece. */
static int list_starts(const Piece *piece, Frame frame, int32_t first, int is_edge,
                       int32_t shortest, const CodonTables *tables, List *list) {
    const double *weights = tables->weights[frame.strand];
    const uint8_t *kinds = tables->kinds[frame.strand];
    const uint8_t *code =
        piece->codes + (frame.strand ? piece->length - frame.end : frame.end - 3);
    int64_t step = frame.strand ? 3 : -3;
    int32_t shortest_partial = 2 * shortest / 3, n_codons = (frame.end - first) / 3;
    double sum = 0;
    frame.first_start = list->n_starts;
    for (int32_t n = 1; n <= n_codons; n++, code += step) {
        int kind = kinds[*code], is_at_edge = is_edge && n == n_codons;
        sum += weights[*code];
        if (kind == EDGE && !is_at_edge)
            continue;
        if (n < (frame.is_open || is_at_edge ? shortest_partial : shortest))
            continue;
        if (add_start(list, frame.end - 3 * n, kind, sum))
            return -1;
    }
    frame.n_starts = list->n_starts - frame.first_start;
    return frame.n_starts ? add_frame(list, &frame) : 0;
}

/* List the open reading frames of a strand, with their starts.
 *
 * stops: those of the piece on this strand, in the row of bases, where the piece begins at `from`. */
static int list_strand(const Piece *piece, int strand, const int32_t *stops, int64_t n_stops,
                       int64_t from, int32_t shortest, const CodonTables *tables, List *list) {
    int32_t first[3] = {0, 1, 2};
    Frame frame = {0};
    frame.strand = (int8_t)strand;
    for (int64_t i = 0; i < n_stops; i++) {
        frame.end = strand ? (int32_t)(from + piece->length - 3 - stops[n_stops - 1 - i])
                           : (int32_t)(stops[i] - from);
        int edge = frame.end % 3;
        int32_t begin = first[edge];
        first[edge] = frame.end + 3;
        if (frame.end - begin >= 2 * shortest &&
            list_starts(piece, frame, begin, begin == edge, shortest, tables, list))
            return -1;
    }
    frame.is_open = 1;
    for (int32_t edge = 0; edge < 3; edge++) {
        frame.end = piece->length - (piece->length - edge) % 3;
        if (frame.end - first[edge] >= 2 * shortest &&
            list_starts(piece, frame, first[edge], first[edge] == edge, shortest, tables, list))
            return -1;
    }
    return 0;
}

/* List the open reading frames of a piece, with their starts. */
static int list_frames(const Piece *piece, const Bases *bases, const Room *room, int32_t shortest,
                       const double *codon_weights, List *list) {
    int64_t from = piece->codes - bases->codes;
    CodonTables tables;
    fill_tables(piece->kind_of_code, codon_weights, &tables);
    list->n_frames = list->n_starts = 0;
    for (int strand = 0; strand < 2; strand++) {
        int64_t first_stop = room->first_stop[strand];
        int64_t n_stops = room->end_stop[strand] - first_stop;
        if (list_strand(piece, strand, bases->stops[strand] + first_stop, n_stops, from, shortest,
                        &tables, list))
            return -1;
    }
    return 0;
}

/* Candidates */

static int grow_candidates(List *list) {
    int64_t most = list->most;
    Candidate *rows = grow(list->rows, &most, sizeof(Candidate));
    if (!rows)
        return -1;
    list->rows = rows;
    most = list->most;
    Candidate *path = grow(list->path, &most, sizeof(Candidate));
    if (!path)
        return -1;
    list->path = path;
    list->most = most;
    return 0;
}

/* The log-odds of a gene with this start, if its binding site were this one. */
static double score_with(const Start *start, double site, const Weights *weights) {
    double odds = weights->start[start->kind];
    if (start->kind != EDGE)
        odds += site;
    return start->codons + odds + GENE;
}

/* The log-odds of a gene with this start, or a negative number. */
static double score_start(const Piece *piece, int strand, Start *start, double best_site,
                          const Weights *weights) {
    double most = score_with(start, best_site, weights);
    if (most < 0) /* a search for the site would not help */
        return most;
    if (start->site == NOT_READ)
        start->site = piece->has_sites && start->kind != EDGE
                          ? (int8_t)binding_site(piece, strand, start->place)
                          : 0;
    return score_with(start, weights->site[start->site], weights);
}

static Candidate candidate_of(const Piece *piece, const Frame *frame, const Start *start,
                              double score) {
    int32_t end = frame->end + (frame->is_open ? 0 : 3);
    Candidate one = {0};
    one.left = frame->strand ? piece->length - end : start->place;
    one.right = frame->strand ? piece->length - start->place : end;
    one.strand = frame->strand;
    one.kind = start->kind;
    one.site = start->site;
    one.is_open = frame->is_open;
    one.n_codons = (frame->end - start->place) / 3;
    one.score = score;
    return one;
}

/* Add the best starts of an open reading frame. */
static int add_candidates(const Piece *piece, const Frame *frame, double best_site,
                          const Weights *weights, List *list) {
    const Start *best[MOST_STARTS];
    double scores[MOST_STARTS];
    int n_best = 0;
    for (int64_t i = 0; i < frame->n_starts; i++) {
        Start *start = list->starts + frame->first_start + i;
        double score = score_start(piece, frame->strand, start, best_site, weights);
        if (score < 0 || (n_best == MOST_STARTS && scores[MOST_STARTS - 1] >= score))
            continue;
        int rank = n_best < MOST_STARTS ? n_best++ : MOST_STARTS - 1;
        for (; rank > 0 && scores[rank - 1] < score; rank--) {
            scores[rank] = scores[rank - 1];
            best[rank] = best[rank - 1];
        }
        scores[rank] = score;
        best[rank] = start;
    }
    for (int i = 0; i < n_best; i++) {
        if (list->n == list->most && grow_candidates(list))
            return -1;
        list->rows[list->n++] = candidate_of(piece, frame, best[i], scores[i]);
    }
    return 0;
}

/* Find the candidates of all open reading frames. */
static int find_candidates(const Piece *piece, const Weights *weights, List *list) {
    double best_site = weights->site[0];
    for (int site = 1; site < N_SITES; site++)
        best_site = larger(best_site, weights->site[site]);
    list->n = 0;
    for (int64_t i = 0; i < list->n_frames; i++)
        if (add_candidates(piece, list->frames + i, best_site, weights, list))
            return -1;
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
        int64_t far = first_above(list, one->left + MOST_OVERLAP);
        one->best = 0;
        one->before = -1;
        for (int strand = 0; strand < 2 && near > 0; strand++) {
            double link = strand == one->strand ? 0 : TURN;
            if (list->prefix[strand][near - 1] + link > one->best) {
                one->best = list->prefix[strand][near - 1] + link;
                one->before = list->prefix_of[strand][near - 1];
            }
        }
        for (int64_t j = near; j < far && j < i; j++) {
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
        if (gene->kind == EDGE || gene->n_codons < TRAINED_ON)
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

static int genes_of(const Piece *piece, const Bases *bases, const Room *room,
                    const uint8_t *is_stop, int32_t shortest, const Weights *usual, List *list,
                    int64_t *n_genes) {
    Weights weights = *usual;
    CodonCounts counts = {0};
    count_in_stretches(piece, room, &counts);
    learn_codons(&counts, is_stop, &weights);
    *n_genes = 0;
    if (list_frames(piece, bases, room, shortest, weights.codon, list))
        return -1;
    for (int round = 0; round < N_ROUNDS; round++) {
        if (round)
            learn_starts(list, *n_genes, piece->has_sites, usual, &weights);
        if (find_candidates(piece, &weights, list) || open_prefix(list))
            return -1;
        find_path(list);
        *n_genes = follow_path(list);
    }
    return 0;
}

/* The genes of each piece, in order: their number, and for each the strand, its first base and one
 * past its last on the forward strand, the kind of its start, whether its end is missing, and the
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
                       (int32_t)lengths[i], has_sites[i]};
        Weights usual = usual_weights(has_sites[i]);
        vnp_find_stretches(&bases, starts[i], piece.length, (int32_t)shortest, &room);
        result = genes_of(&piece, &bases, &room, is_stop, (int32_t)shortest, &usual, &list,
                          n_genes + i);
        for (int64_t rank = 0; result == 0 && rank < n_genes[i]; rank++) {
            const Candidate *gene = list.path + rank;
            *rows++ = gene->strand;
            *rows++ = gene->left;
            *rows++ = gene->right;
            *rows++ = gene->kind;
            *rows++ = gene->is_open;
            *scores++ = gene->score;
        }
    }
    vnp_close_room(&room);
    close_list(&list);
    return result;
}

/* Translate genes without their stop. A start codon is M.
 *
 * rows: (n, 5), the first base of the piece is added to those of `find_genes`. letters: (N_CODES,).
 * proteins: the letters of all genes, one after the other. */
int translate_genes(const uint8_t *codes, const int64_t *rows, int64_t n, const uint8_t *letters,
                    uint8_t *proteins) {
    uint8_t letter_of[2][N_CODES];
    for (int code = 0; code < N_CODES; code++) {
        letter_of[0][code] = letters[code];
        letter_of[1][code] = letters[other_of(code)];
    }
    for (int64_t i = 0; i < n; i++, rows += 5) {
        int64_t strand = rows[0], left = rows[1], right = rows[2];
        int64_t n_codons = (right - left) / 3 - !rows[4];
        const uint8_t *code = codes + (strand ? right - 3 : left), *letter = letter_of[strand];
        uint8_t *first = proteins;
        for (int64_t codon = 0; codon < n_codons; codon++, code += strand ? -3 : 3)
            *proteins++ = letter[*code];
        if (rows[3] != EDGE)
            *first = 'M';
    }
    return 0;
}
