/* Find identical ORFs, and write the entries of shards. */

#include <stdint.h>
#include <string.h>

enum { DIGEST = 16 /* bytes */, BLOCK = 64 /* bytes */, N_ROUNDS = 10 };

/* Text i is letters[bounds[i]] to letters[bounds[i + 1]]. */
typedef struct {
    const uint8_t *letters;
    const int64_t *bounds;
} Texts;

/* BLAKE2s (RFC 7693) with a digest of 32 bytes and no key, of texts that are joined by a blank. */

static const uint32_t START[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                  0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
static const uint8_t SIGMA[N_ROUNDS][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

typedef struct {
    uint32_t state[8];
    uint64_t n_bytes; /* in compressed blocks */
    uint8_t block[BLOCK];
    int n_waiting; /* bytes of the block */
} Digester;

static uint32_t rotate(uint32_t word, int n_bits) {
    return word >> n_bits | word << (32 - n_bits);
}

static void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

static uint32_t read_word(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static void compress(Digester *digester, int is_last) {
    uint32_t v[16], m[16];
    digester->n_bytes += digester->n_waiting;
    memcpy(v, digester->state, sizeof digester->state);
    memcpy(v + 8, START, sizeof START);
    v[12] ^= (uint32_t)digester->n_bytes;
    v[13] ^= (uint32_t)(digester->n_bytes >> 32);
    v[14] ^= is_last ? UINT32_MAX : 0;
    for (int i = 0; i < 16; i++)
        m[i] = read_word(digester->block + 4 * i);
    for (int round = 0; round < N_ROUNDS; round++) {
        const uint8_t *s = SIGMA[round];
        for (int i = 0; i < 4; i++)
            mix(v, i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]],
                m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++)
        digester->state[i] ^= v[i] ^ v[8 + i];
    digester->n_waiting = 0;
}

static void add_bytes(Digester *digester, const uint8_t *bytes, int64_t n) {
    while (n > 0) {
        if (digester->n_waiting == BLOCK)
            compress(digester, 0);
        int64_t n_free = BLOCK - digester->n_waiting, n_more = n < n_free ? n : n_free;
        memcpy(digester->block + digester->n_waiting, bytes, n_more);
        digester->n_waiting += n_more;
        bytes += n_more;
        n -= n_more;
    }
}

/* Write the first half of the digest of each of n texts, or of n pairs of texts. */
int digest_texts(const uint8_t *letters, const int64_t *bounds, const uint8_t *more_letters,
                 const int64_t *more_bounds, int64_t n_texts, int64_t n, uint64_t *digests) {
    const Texts texts[] = {{letters, bounds}, {more_letters, more_bounds}};
    for (int64_t row = 0; row < n; row++, digests += 2) {
        Digester digester = {.n_bytes = 0};
        memcpy(digester.state, START, sizeof START);
        digester.state[0] ^= 0x01010020; /* a digest of 32 bytes, without a key */
        for (int i = 0; i < n_texts; i++) {
            if (i)
                add_bytes(&digester, (const uint8_t *)" ", 1);
            int64_t first = texts[i].bounds[row], end = texts[i].bounds[row + 1];
            add_bytes(&digester, texts[i].letters + first, end - first);
        }
        memset(digester.block + digester.n_waiting, 0, BLOCK - digester.n_waiting);
        compress(&digester, 1);
        memcpy(digests, digester.state, DIGEST);
    }
    return 0;
}

/* A slot has the two words of a digest, and the ordinal + 1 of its ORF, or 0 without one. */
static uint64_t *find_slot(uint64_t *slots, int64_t n_slots, const uint64_t *digest) {
    int64_t index = digest[0] & (n_slots - 1);
    uint64_t *slot = slots + 3 * index;
    while (slot[2] && (slot[0] != digest[0] || slot[1] != digest[1])) {
        index = (index + 1) & (n_slots - 1);
        slot = slots + 3 * index;
    }
    return slot;
}

/* For each of n digests, write the ordinal of the original, or -1 if the digest is new.
 *
 * `slots` has two hash tables of n_slots slots, a power of two above `most`. When the newer table
 * has `most` digests, it becomes the older one, and the digests of the older one are forgotten. The
 * state has the number of originals, the number of digests in the newer table, and its index. */
int find_originals(const uint64_t *digests, int64_t n, uint64_t *slots, int64_t n_slots,
                   int64_t most, int64_t *state, int64_t *originals) {
    enum { N_EMBEDDED, N_NEWER, NEWER };
    uint64_t *tables[] = {slots, slots + 3 * n_slots};
    for (int64_t row = 0; row < n; row++, digests += 2) {
        uint64_t *newer = find_slot(tables[state[NEWER]], n_slots, digests);
        uint64_t ordinal = newer[2];
        if (!ordinal && state[N_NEWER] < state[N_EMBEDDED])
            ordinal = find_slot(tables[!state[NEWER]], n_slots, digests)[2];
        originals[row] = (int64_t)ordinal - 1;
        if (ordinal)
            continue;
        if (state[N_NEWER] == most) {
            state[NEWER] = !state[NEWER];
            state[N_NEWER] = 0;
            memset(tables[state[NEWER]], 0, 3 * n_slots * sizeof *slots);
            newer = find_slot(tables[state[NEWER]], n_slots, digests);
        }
        memcpy(newer, digests, DIGEST);
        newer[2] = ++state[N_EMBEDDED];
        state[N_NEWER]++;
    }
    return 0;
}

static uint8_t *put_bytes(uint8_t *out, const void *bytes, int64_t n) {
    memcpy(out, bytes, n);
    return out + n;
}

static uint8_t *put_word(uint8_t *out, const char *word) {
    return put_bytes(out, word, strlen(word));
}

static uint8_t *put_text(uint8_t *out, const Texts *texts, int64_t row) {
    int64_t first = texts->bounds[row];
    return put_bytes(out, texts->letters + first, texts->bounds[row + 1] - first);
}

static uint8_t *put_number(uint8_t *out, int64_t number) {
    uint8_t digits[20];
    int n = 0;
    do
        digits[n++] = '0' + number % 10;
    while (number /= 10);
    while (n)
        *out++ = digits[--n];
    return out;
}

/* Write the entry of each of n ORFs, and its end in `out`. */
int write_entries(const uint8_t *chunk_ids, const int64_t *chunk_bounds, const uint8_t *record_ids,
                  const int64_t *record_bounds, const int64_t *chunks, const uint8_t *frames,
                  const int64_t *starts, const int64_t *ends, const uint8_t *proteins,
                  const int64_t *protein_bounds, const uint8_t *bases, const int64_t *base_bounds,
                  const int64_t *originals, int64_t n, uint8_t *out, int64_t *entry_ends) {
    static const char *const ENDINGS[] = {"F1", "F2", "F3", "R1", "R2", "R3", ""};
    static const char *const STRANDS[] = {"+", "+", "+", "-", "-", "-", "."};
    const Texts chunk_names = {chunk_ids, chunk_bounds};
    const Texts record_names = {record_ids, record_bounds};
    const Texts protein_texts = {proteins, protein_bounds};
    const Texts base_texts = {bases, base_bounds};
    const uint8_t *first = out;
    for (int64_t row = 0; row < n; row++) {
        out = put_word(out, ">");
        out = put_text(out, &chunk_names, chunks[row]);
        out = put_word(out, ENDINGS[frames[row]]);
        out = put_word(out, " chunk=");
        out = put_text(out, &chunk_names, chunks[row]);
        out = put_word(out, " record=");
        out = put_text(out, &record_names, chunks[row]);
        out = put_word(out, " start=");
        out = put_number(out, starts[row]);
        out = put_word(out, " end=");
        out = put_number(out, ends[row]);
        out = put_word(out, " strand=");
        out = put_word(out, STRANDS[frames[row]]);
        if (base_bounds[row + 1] > base_bounds[row]) {
            out = put_word(out, " bases=");
            out = put_text(out, &base_texts, row);
        }
        if (originals[row] >= 0) {
            out = put_word(out, " copy=");
            out = put_number(out, originals[row]);
        }
        out = put_word(out, "\n");
        out = put_text(out, &protein_texts, row);
        out = put_word(out, "\n");
        entry_ends[row] = out - first;
    }
    return 0;
}
