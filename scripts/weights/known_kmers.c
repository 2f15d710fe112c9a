/* Collect the k-mers of known viruses in a hash table, and mark those that cells have, too.
 *
 * build_known_index.py compiles this file together with the scanner of the package, known.c, and
 * documents the arrays. A slot of the table has one k-mer, and an empty slot has the hash 0. The
 * k-mer with this hash, nine times alanine, is left out.
 */

#include "../../virnucpro/viral/native/known.c"

enum { NO_GROUP = -2, SEVERAL = -1 };

/* The slot of a hash, or the empty slot where it belongs; the number of slots is a power of two. */
static int64_t slot_of(const uint64_t *hashes, int64_t n_slots, uint64_t hash) {
    int64_t slot = (int64_t)(hash & (uint64_t)(n_slots - 1));
    while (hashes[slot] && hashes[slot] != hash)
        slot = (slot + 1) & (n_slots - 1);
    return slot;
}

/* Add the k-mers of a virus that lie in its coding stretches.
 *
 * is_coding: for each base, bit 0 if a codon of a forward stretch starts there, bit 1 if the
 * codon is one of a reverse stretch. Viruses come ordered by species, so the latest one of each
 * k-mer is enough to count them. */
int add_virus(const uint8_t *digits, int64_t n, const uint8_t *is_coding,
              const uint8_t *residue_of, int64_t n_slots, uint64_t *hashes, int32_t species,
              int32_t owner, uint8_t is_short, int32_t *latest, uint8_t *n_species,
              int32_t *owners, uint8_t *is_of_short) {
    uint8_t residues[2][N_CODES];
    uint64_t both[2];
    int is_sampled[2];
    Scan scan = begin_scan();
    fill_residues(residue_of, residues);
    for (int64_t position = 0; position < n - 2; position++) {
        read_codon(&scan.frames[position % N_FRAMES], digits + position, residues, both,
                   is_sampled);
        for (int strand = 0; strand < 2; strand++) {
            int64_t slot;
            if (!is_sampled[strand] || !(is_coding[position] >> strand & 1) || !both[strand])
                continue;
            slot = slot_of(hashes, n_slots, both[strand]);
            if (!hashes[slot] || latest[slot] != species)
                n_species[slot] += n_species[slot] < UINT8_MAX;
            hashes[slot] = both[strand];
            latest[slot] = species;
            if (owner && owners[slot] != owner)
                owners[slot] = owners[slot] ? SEVERAL : owner;
            is_of_short[slot] |= is_short;
        }
    }
    return 0;
}

/* Mark the k-mers of a cell: the group that has them, or SEVERAL. */
int mark_cell(const uint8_t *digits, int64_t n, const uint8_t *residue_of, int64_t n_slots,
              const uint64_t *hashes, int32_t group, int32_t *groups) {
    uint8_t residues[2][N_CODES];
    uint64_t batch[BATCH];
    Scan scan = begin_scan();
    int n_here = NEARLY_FULL;
    fill_residues(residue_of, residues);
    while (n_here >= NEARLY_FULL) {
        n_here = next_kmers(&scan, digits, n - 2, residues, UINT64_MAX, batch);
        for (int i = 0; i < n_here; i++)
            __builtin_prefetch(hashes + (batch[i] & (uint64_t)(n_slots - 1)));
        for (int i = 0; i < n_here; i++) {
            int64_t slot = slot_of(hashes, n_slots, batch[i]);
            if (hashes[slot] && groups[slot] != group)
                groups[slot] = groups[slot] == NO_GROUP ? group : SEVERAL;
        }
    }
    return 0;
}

/* The slots of the k-mers of a fragment that the table has, and the number of its k-mers. */
int find_slots(const uint8_t *digits, int64_t n, const uint8_t *residue_of, uint64_t limit,
               int64_t n_slots, const uint64_t *hashes, int64_t *n_kmers, int64_t *slots,
               int64_t *n_found) {
    uint8_t residues[2][N_CODES];
    uint64_t batch[BATCH];
    Scan scan = begin_scan();
    int n_here = NEARLY_FULL;
    fill_residues(residue_of, residues);
    *n_kmers = *n_found = 0;
    while (n_here >= NEARLY_FULL) {
        n_here = next_kmers(&scan, digits, n - 2, residues, limit, batch);
        *n_kmers += n_here;
        for (int i = 0; i < n_here; i++)
            __builtin_prefetch(hashes + (batch[i] & (uint64_t)(n_slots - 1)));
        for (int i = 0; i < n_here; i++) {
            int64_t slot = slot_of(hashes, n_slots, batch[i]);
            if (hashes[slot])
                slots[(*n_found)++] = slot;
        }
    }
    return 0;
}

/* The hashes of the sampled k-mers of a sequence, which may be equal. */
int list_kmers(const uint8_t *digits, int64_t n, const uint8_t *residue_of, uint64_t limit,
               uint64_t *hashes, int64_t *n_kmers) {
    uint8_t residues[2][N_CODES];
    uint64_t batch[BATCH];
    Scan scan = begin_scan();
    int n_here = NEARLY_FULL;
    fill_residues(residue_of, residues);
    *n_kmers = 0;
    while (n_here >= NEARLY_FULL) {
        n_here = next_kmers(&scan, digits, n - 2, residues, limit, batch);
        memcpy(hashes + *n_kmers, batch, n_here * sizeof *hashes);
        *n_kmers += n_here;
    }
    return 0;
}

/* The hashes of the sampled k-mers in the coding stretches of a virus, as in add_virus. */
int list_coding_kmers(const uint8_t *digits, int64_t n, const uint8_t *is_coding,
                      const uint8_t *residue_of, uint64_t limit, uint64_t *hashes,
                      int64_t *n_kmers) {
    uint8_t residues[2][N_CODES];
    uint64_t both[2];
    int is_sampled[2];
    Scan scan = begin_scan();
    fill_residues(residue_of, residues);
    *n_kmers = 0;
    for (int64_t position = 0; position < n - 2; position++) {
        read_codon(&scan.frames[position % N_FRAMES], digits + position, residues, both,
                   is_sampled);
        for (int strand = 0; strand < 2; strand++)
            if (is_sampled[strand] && is_coding[position] >> strand & 1 && both[strand] &&
                both[strand] <= limit)
                hashes[(*n_kmers)++] = both[strand];
    }
    return 0;
}
