/* Find regions: figures of pieces, and the Markov chain of host and virus. */

#include <math.h>
#include <stdlib.h>

#include "common.h"

enum {
    N_SHAPE = 3, /* figures of genes: longest stretch, the same beyond chance, genes per kb */
    N_PARTS = 20 /* of the pieces of a record by GC */
};

static const double SIGNS[N_SHAPE] = {-1, -1, 1}; /* in which genes of viruses differ from hosts' */
static const double MOST_SHAPE = 1; /* deviations; larger ones suggest no genes, not viral ones */

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
