/* Compute the log-odds of pieces by nets in whole numbers, and linear layers.
 *
 * The kernels are chosen when the library is loaded, by what the processor supports.
 */

#include <math.h>
#include <stdlib.h>

#include "features.h"

enum {
    N_LEVELS = 127 /* from the mean of a feature to its limit */
};

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
 * several kinds also adds the probability of each kind: (n_rows, n_kinds). */
static Layer read_net(const Nets *nets, const Desk *desk, Layer layer, const int64_t *size,
                      int64_t n_rows, double *sums, double *kinds) {
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
                for (int64_t kind = 0; kind < n_kinds; kind++)
                    kinds[(first + row) * n_kinds + kind] += exp(logits[kind] - all);
            }
        }
    }
    return layer;
}

/* The kinds that nets distinguish, if any does: how many, and how many of them are viral; and the
 * number of these nets. */
typedef struct {
    int64_t n_kinds, n_viral, n_nets;
} Kinds;

static Kinds kinds_of(const Nets *nets) {
    Kinds kinds = {0, 0, 0};
    for (int64_t net = 0; net < nets->n_nets; net++) {
        const int64_t *size = nets->sizes + net * N_SIZES;
        if (size[4] > 2) {
            kinds.n_kinds = size[4];
            kinds.n_viral = size[5];
            kinds.n_nets++;
        }
    }
    return kinds;
}

/* The mean log-odds over nets, for each row on the desk, at most ROWS_READ, and the mean
 * probability of each kind over the nets that know several: (n_rows, n_kinds). Nets that know
 * prokaryotes and their viruses alone, as two kinds, move the mean of the others half of the way to
 * theirs, times the probability, by the others, that the row is one of these. These are the first
 * viral and the first cellular kind. */
static void write_log_odds(const Nets *nets, const Desk *desk, int64_t n_rows, double *log_odds,
                           double *kinds) {
    double special[ROWS_READ] = {0};
    int64_t n_special = 0;
    Kinds known = kinds_of(nets);
    Layer layer = {nets->weights, nets->start, nets->worth, 0, 0};
    clear(log_odds, n_rows * sizeof(double));
    clear(kinds, n_rows * known.n_kinds * sizeof(double));
    for (int64_t net = 0; net < nets->n_nets; net++) {
        const int64_t *size = nets->sizes + net * N_SIZES;
        int is_special = size[6] != 0;
        layer = read_net(nets, desk, layer, size, n_rows, is_special ? special : log_odds, kinds);
        n_special += is_special;
    }
    for (int64_t i = 0; i < n_rows * known.n_kinds; i++)
        kinds[i] /= known.n_nets;
    for (int64_t row = 0; row < n_rows; row++) {
        const double *of_row = kinds + row * known.n_kinds;
        log_odds[row] /= nets->n_nets - n_special;
        if (n_special && known.n_kinds)
            log_odds[row] += (of_row[0] + of_row[known.n_viral]) *
                             (special[row] / n_special - log_odds[row]) / 2;
    }
}

/* The log-odds by all nets, and the probability of each kind: (n, n_features) -> (n,),
 * (n, n_kinds). */
int net_log_odds(const float *features, int64_t n, const float *centre, const float *scale,
                 int64_t n_features, int64_t n_nets, const int64_t *sizes, const int8_t *weights,
                 const int32_t *start, const float *worth, double *log_odds, double *kinds) {
    Nets nets = {centre, scale, n_features, n_nets, sizes, weights, start, worth};
    int64_t n_kinds = kinds_of(&nets).n_kinds;
    Desk desk = {0};
    int result = open_desk(&desk, &nets);
    for (int64_t low = 0; result == 0 && low < n; low += ROWS_READ) {
        int64_t n_rows = n - low < ROWS_READ ? n - low : ROWS_READ;
        for (int64_t row = 0; row < n_rows; row++)
            kernels.levels(&nets, features + (low + row) * n_features,
                           desk.levels + row * width_of(&nets));
        write_log_odds(&nets, &desk, n_rows, log_odds + low, kinds + low * n_kinds);
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

/* The log-odds by all nets for some of the pieces that were read in parts, and the probability of
 * each kind: (n,) -> (n,), (n, n_kinds). */
int whole_log_odds(const double *totals, const int64_t *n_parts, const double *layout,
                   const int64_t *rows, int64_t n, const float *centre, const float *scale,
                   int64_t n_features, int64_t n_nets, const int64_t *sizes,
                   const int8_t *weights, const int32_t *start, const float *worth,
                   double *log_odds, double *kinds) {
    float *features = malloc((n * (N_FEATURES + N_LAYOUT) + 1) * sizeof(float));
    int result = -1;
    if (!features)
        return result;
    for (int64_t i = 0; i < n; i++)
        write_whole(totals + rows[i] * N_FEATURES, n_parts[rows[i]], layout + rows[i] * N_LAYOUT,
                    features + i * (N_FEATURES + N_LAYOUT));
    result = net_log_odds(features, n, centre, scale, n_features, n_nets, sizes, weights, start,
                          worth, log_odds, kinds);
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

/* Read pieces: their mean log-odds over nets, NaN if all bases are unknown, the probability of each
 * kind, and chosen features.
 *
 * The features of a piece with a known base are added to the rows of `totals` that `rows` names,
 * (n, MOST_WHOLES); -1: none. The classes of k-mers, (n_digits, 2), are kept for other pieces. */
int piece_log_odds(const uint8_t *digits, int64_t n_digits, const uint8_t *codes,
                   const uint8_t *tetra, const int32_t *stops, const int64_t *n_stops,
                   const int64_t *starts, const int64_t *lengths, int64_t n,
                   const uint8_t *code_tables, const uint8_t *hints, const uint8_t *n_of_bucket,
                   const int32_t *first, const uint16_t *entries, int64_t n_entries,
                   uint8_t *classes, const float *centre, const float *scale, int64_t n_features,
                   int64_t n_nets, const int64_t *sizes,
                   const int8_t *weights, const int32_t *start, const float *worth,
                   double *log_odds, double *kinds, const int64_t *chosen, int64_t n_chosen,
                   float *figures,
                   const int64_t *rows, double *totals, int64_t *n_parts) {
    Bases bases = bases_of(digits, n_digits, codes, tetra, stops, n_stops);
    KmerTable kmers = {hints, n_of_bucket, first, entries, n_entries};
    Nets nets = {centre, scale, n_features, n_nets, sizes, weights, start, worth};
    int64_t n_kinds = kinds_of(&nets).n_kinds;
    uint8_t is_blank[ROWS_READ];
    float features[N_FEATURES];
    Reader reader = {0};
    Desk desk = {0};
    int result = vnp_open_reader(&reader, &bases, lengths, n, code_tables, &kmers, classes);
    if (open_desk(&desk, &nets))
        result = -1;
    for (int64_t i = 0; result == 0 && i < n; i++) {
        int64_t row = i % ROWS_READ;
        is_blank[row] = vnp_read_piece(&reader, starts[i], (int32_t)lengths[i], features);
        for (int64_t j = 0; j < n_chosen; j++)
            figures[i * n_chosen + j] = features[chosen[j]];
        if (!is_blank[row])
            add_part(features, rows + i * MOST_WHOLES, totals, n_parts);
        kernels.levels(&nets, features, desk.levels + row * width_of(&nets));
        if (row < ROWS_READ - 1 && i < n - 1)
            continue;
        write_log_odds(&nets, &desk, row + 1, log_odds + i - row, kinds + (i - row) * n_kinds);
        for (int64_t j = 0; j <= row; j++)
            if (is_blank[j])
                log_odds[i - row + j] = NAN;
    }
    close_desk(&desk);
    vnp_close_reader(&reader);
    return result;
}
