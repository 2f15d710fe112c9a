/* Write and read the rows of tables. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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
