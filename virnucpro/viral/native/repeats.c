/* Find the words that two texts share, and count the words of a text. */

#include <stdlib.h>

#include "kmers.h"

/* Common words */

/* A word of `size` digits that moves along a text. */
typedef struct {
    int64_t number, mask, size, n_known;
} Word;

static Word word_of(int64_t size) {
    Word word = {0, (INT64_C(1) << 2 * size) - 1, size, 0};
    return word;
}

/* Move a word to its next digit; return whether all its digits are known. */
static inline int add_digit(Word *word, uint8_t digit) {
    word->n_known = digit < UNKNOWN ? word->n_known + 1 : 0;
    word->number = (4 * word->number + (digit & 3)) & word->mask;
    return word->n_known >= word->size;
}

/* A set of words by a hash of each: other words may seem to be in it. */
typedef struct {
    uint8_t *bytes; /* a bit for each hash */
    int bits;       /* of a hash */
} Marks;

static int open_marks(Marks *marks, int64_t n_words) {
    enum { FEWEST_BITS = 16, MOST_BITS = 24, PER_WORD = 8 };
    marks->bits = FEWEST_BITS;
    while (marks->bits < MOST_BITS && INT64_C(1) << marks->bits < PER_WORD * n_words)
        marks->bits++;
    marks->bytes = calloc((size_t)1 << (marks->bits - 3), 1);
    return marks->bytes ? 0 : -1;
}

static inline uint64_t mark_of(const Marks *marks, int64_t number) {
    return (uint64_t)number * UINT64_C(0x9E3779B97F4A7C15) >> (64 - marks->bits);
}

static inline void add_mark(Marks *marks, int64_t number, int is_known) {
    uint64_t mark = mark_of(marks, number);
    marks->bytes[mark >> 3] |= is_known << (mark & 7);
}

static inline int has_mark(const Marks *marks, int64_t number) {
    uint64_t mark = mark_of(marks, number);
    return marks->bytes[mark >> 3] >> (mark & 7) & 1;
}

/* Words of one text that may be words of another, in order, and a hash table of them. */
typedef struct {
    int64_t *numbers;
    int32_t *places, *next, *first; /* first: by slot; next: of the same slot; -1: none */
    int64_t n_words;
    int bits; /* of a slot */
    Marks marks;
} Shared;

static void close_shared(Shared *shared) {
    free(shared->numbers);
    free(shared->places);
    free(shared->next);
    free(shared->first);
    free(shared->marks.bytes);
}

/* List the words of a text that may be in a set, which few are. */
static int list_words(const uint8_t *digits, int64_t n, int64_t size, const Marks *marks,
                      Shared *shared) {
    Word word = word_of(size);
    int64_t n_words = 0;
    shared->numbers = malloc((n + 1) * sizeof(int64_t));
    shared->places = malloc((n + 1) * sizeof(int32_t));
    if (!shared->numbers || !shared->places)
        return -1;
    for (int64_t i = 0; i < n; i++) {
        int is_known = add_digit(&word, digits[i]);
        shared->numbers[n_words] = word.number;
        shared->places[n_words] = (int32_t)(i + 1 - size);
        n_words += is_known & has_mark(marks, word.number); /* no branch: it is unpredictable */
    }
    shared->n_words = n_words;
    return 0;
}

/* Fill the hash table and the set of its words. Words in a slot are in the order of the text. */
static int index_shared(Shared *shared) {
    int64_t n_slots = 1024;
    shared->bits = 10;
    for (; n_slots < 2 * shared->n_words; n_slots *= 2)
        shared->bits++;
    shared->first = malloc(n_slots * sizeof(int32_t));
    shared->next = malloc((shared->n_words + 1) * sizeof(int32_t));
    if (!shared->first || !shared->next || open_marks(&shared->marks, shared->n_words))
        return -1;
    memset(shared->first, 0xff, n_slots * sizeof(int32_t));
    for (int64_t i = shared->n_words - 1; i >= 0; i--) {
        uint64_t slot = hash_of(shared->numbers[i]) >> (64 - shared->bits);
        shared->next[i] = shared->first[slot];
        shared->first[slot] = (int32_t)i;
        add_mark(&shared->marks, shared->numbers[i], 1);
    }
    return 0;
}

/* Write up to `most` places of a word, ascending; return their number. */
static int find_places(const Shared *shared, int64_t number, int most, int32_t *places) {
    int n_places = 0;
    int32_t i = shared->first[hash_of(number) >> (64 - shared->bits)];
    for (; i >= 0 && n_places < most; i = shared->next[i])
        if (shared->numbers[i] == number)
            places[n_places++] = shared->places[i];
    return n_places;
}

/* Write the common words that begin with the words in the hash table; return the end of rows. */
static int64_t *write_common(const Shared *shared, const uint8_t *left, int64_t n_left,
                             const uint8_t *right, int64_t n_right, int64_t size, int64_t longest,
                             int64_t *rows) {
    enum { TOO_MANY = 3 };
    Word word = word_of(size);
    for (int64_t end = 0; end < n_right; end++) {
        int32_t places[TOO_MANY];
        int n_places = 0;
        int64_t j = end + 1 - size;
        if (add_digit(&word, right[end]) & has_mark(&shared->marks, word.number))
            n_places = find_places(shared, word.number, TOO_MANY, places);
        for (int place = 0; n_places < TOO_MANY && place < n_places; place++) {
            int64_t i = places[place], n = size;
            if (i && j && left[i - 1] == right[j - 1] && left[i - 1] != UNKNOWN)
                continue; /* part of a longer common word */
            while (n < longest && i + n < n_left && j + n < n_right && left[i + n] != UNKNOWN &&
                   left[i + n] == right[j + n])
                n++;
            *rows++ = i;
            *rows++ = j;
            *rows++ = n;
        }
    }
    return rows;
}

/* Maximal common words of at least `size` letters: place in left, place in right, length.
 *
 * Each begins with a word that occurs once or twice in left; its length is at most `longest`. The
 * caller allocates two rows per letter of right. */
int common_words(const uint8_t *left, int64_t n_left, const uint8_t *right, int64_t n_right,
                 int64_t size, int64_t longest, int64_t *rows, int64_t *n_rows) {
    Shared shared = {0};
    Marks marks = {0};
    Word word = word_of(size);
    int result;
    *n_rows = 0;
    if (n_left < size || n_right < size)
        return 0;
    result = open_marks(&marks, n_right);
    for (int64_t i = 0; result == 0 && i < n_right; i++) {
        int is_known = add_digit(&word, right[i]);
        add_mark(&marks, word.number, is_known);
    }
    if (result == 0)
        result = list_words(left, n_left, size, &marks, &shared);
    if (result == 0)
        result = index_shared(&shared);
    if (result == 0)
        *n_rows = (write_common(&shared, left, n_left, right, n_right, size, longest, rows) -
                   rows) / 3;
    close_shared(&shared);
    free(marks.bytes);
    return result;
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

/* Count words
 *
 * Some eight letters of a word, of twelve letters or more, always begin at a multiple of five. So
 * only these places of a text are searched, or listed in an index of the text. */

enum { EVERY = 5, EIGHT_BITS = 16 };

/* A hash of eight letters. */
static inline uint64_t hash_eight(uint64_t eight) {
    return eight * UINT64_C(0x9E3779B97F4A7C15) >> (64 - EIGHT_BITS);
}

static inline uint64_t read_eight(const uint8_t *letters) {
    uint64_t eight;
    memcpy(&eight, letters, sizeof eight);
    return eight;
}

/* Add to counts how often each word occurs in a text. Copies of one word do not overlap. */
int count_words(const uint8_t *text, int64_t n, const uint8_t *words, const int64_t *lengths,
                int64_t n_words, int64_t *counts) {
    uint8_t *is_part = calloc(1 << (EIGHT_BITS - 3), 1); /* a bit for each hash of eight letters */
    int64_t *ends = calloc(n_words + 1, sizeof(int64_t)); /* first places where each may begin */
    int is_short = !is_part || !ends;
    const uint8_t *word = words;
    for (int64_t i = 0; !is_short && i < n_words; word += lengths[i++]) {
        for (int first = 0; first < EVERY; first++) {
            uint64_t hash = hash_eight(read_eight(word + first));
            is_part[hash >> 3] |= 1 << (hash & 7);
        }
    }
    for (int64_t place = 0; !is_short && place + 8 <= n; place += EVERY) {
        uint64_t eight = read_eight(text + place), hash = hash_eight(eight);
        if (!(is_part[hash >> 3] >> (hash & 7) & 1))
            continue;
        word = words;
        for (int64_t i = 0; i < n_words; word += lengths[i++])
            for (int64_t start = place - EVERY + 1; start <= place; start++)
                if (read_eight(word + (place - start)) == eight && /* a cheap test, mostly false */
                    start >= ends[i] && start + lengths[i] <= n &&
                    memcmp(word, text + start, lengths[i]) == 0) {
                    counts[i]++;
                    ends[i] = start + lengths[i];
                }
    }
    free(is_part);
    free(ends);
    return is_short ? -1 : 0;
}

/* List the places of a text that are multiples of five by the hash of their eight letters.
 *
 * firsts: (2^16 + 1,) first place of each hash in `places`, (n / 5 + 1,). */
int index_text(const uint8_t *text, int64_t n, int32_t *firsts, int32_t *places) {
    enum { N_HASHES = 1 << EIGHT_BITS };
    int32_t n_before = 0;
    clear(firsts, (N_HASHES + 1) * sizeof(int32_t));
    for (int64_t place = 0; place + 8 <= n; place += EVERY)
        firsts[hash_eight(read_eight(text + place))]++;
    for (int hash = 0; hash <= N_HASHES; hash++) {
        n_before += firsts[hash];
        firsts[hash] = n_before; /* the end of the hash, until its places are listed backwards */
    }
    for (int64_t place = (n - 8) / EVERY * EVERY; n >= 8 && place >= 0; place -= EVERY)
        places[--firsts[hash_eight(read_eight(text + place))]] = (int32_t)place;
    return 0;
}

static int compare_places(const void *one, const void *other) {
    int32_t a = *(const int32_t *)one, b = *(const int32_t *)other;
    return (a > b) - (a < b);
}

/* The most places that a word may have in an indexed text. */
static int64_t count_candidates(const int32_t *firsts, const uint8_t *word) {
    int64_t n = 0;
    for (int offset = 0; offset < EVERY; offset++) {
        uint64_t hash = hash_eight(read_eight(word + offset));
        n += firsts[hash + 1] - firsts[hash];
    }
    return n;
}

/* Write the places of a word in an indexed text from first to before end; return their number. */
static int64_t find_indexed(const uint8_t *text, int64_t first, int64_t end,
                            const int32_t *firsts, const int32_t *places, const uint8_t *word,
                            int64_t length, int32_t *found) {
    int64_t n_found = 0;
    for (int offset = 0; offset < EVERY; offset++) {
        uint64_t eight = read_eight(word + offset), hash = hash_eight(eight);
        for (int32_t i = firsts[hash]; i < firsts[hash + 1]; i++) {
            int64_t start = places[i] - offset;
            if (read_eight(text + places[i]) == eight && start >= first &&
                start + length <= end && memcmp(word, text + start, length) == 0)
                found[n_found++] = (int32_t)start;
        }
    }
    qsort(found, n_found, sizeof(int32_t), compare_places);
    return n_found;
}

/* Add to counts how often each word occurs in an indexed text from first to before end, as
 * `count_words` does. */
int count_indexed(const uint8_t *text, int64_t first, int64_t end, const int32_t *firsts,
                  const int32_t *places, const uint8_t *words, const int64_t *lengths,
                  int64_t n_words, int64_t *counts) {
    const uint8_t *word = words;
    int64_t most = 0;
    int32_t *found;
    for (int64_t i = 0; i < n_words; word += lengths[i++])
        most = at_least(count_candidates(firsts, word), most);
    found = malloc((most + 1) * sizeof(int32_t));
    if (!found)
        return -1;
    for (int64_t i = 0; i < n_words; words += lengths[i++]) {
        int64_t next = first;
        int64_t n = find_indexed(text, first, end, firsts, places, words, lengths[i], found);
        for (int64_t j = 0; j < n; j++)
            if (found[j] >= next) {
                counts[i]++;
                next = found[j] + lengths[i];
            }
    }
    free(found);
    return 0;
}

/* The most known digits that pair with each other around one axis. Each digit of a pair
 * counts. */
int paired_digits(const uint8_t *digits, int64_t n, int64_t *n_paired) {
    int64_t most = 0;
    for (int64_t axis = 0; axis < 2 * n - 1; axis++) {
        int64_t first = axis < n ? 0 : axis - n + 1, last = axis - first, n_pairs = 0;
        for (int64_t i = first; i <= last; i++)
            n_pairs += digits[i] < UNKNOWN && digits[i] + digits[axis - i] == 3;
        most = at_least(n_pairs, most);
    }
    *n_paired = most;
    return 0;
}
