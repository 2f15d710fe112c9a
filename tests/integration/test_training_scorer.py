"""Training of the scorer: groups count evenly, folds do not leak, and negatives are generated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from feature_extraction import fragment_features
from piece_networks import PieceRange, TrainingConfig, TrainingSet, fit_piece_networks
from sampling import Fragments, RecordSet, collect_records, gc_matched_weights, sample_fragments
from scorer_calibration import (
    ELEMENTS,
    MIN_GROUPS,
    N_FOLDS,
    assign_folds,
    bootstrap_margin,
    cell_kind_masks,
    fit_knot,
    fragment_log_odds,
    raise_thresholds,
    smooth_error_rates,
)
from scorer_file import save_scorer
from scorer_kmers import FoldKmerTables, count_kmer_groups, is_in_sample, look_up_classes
from synthetic_negatives import NEGATIVE_KINDS, make_negative, shuffle_dinucleotides
from train_embedded_scorer import (
    ARCHAEAL_GENES,
    GC_MATCHED,
    WITH_ARCHAEAL_GENES,
    LabelledData,
    read_split_records,
)

from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.training.evaluation.calibration import fit_error_rates
from virnucpro.training.labelled_data import LabelledRecord
from virnucpro.viral.features import (
    NO_KMERS,
    KmerClass,
    WindowFeatures,
)
from virnucpro.viral.networks import (
    ErrorRates,
    Kingdom,
    Knot,
    Scorer,
    false_discovery_rates,
    load_scorer,
    thresholds,
)

SHARES = {"phages": 0.75, "RNA viruses": 0.25, "bacteria": 1.0}


def collection_of(rows: list[tuple[str, bool, str, str]], n_bases: int = 400) -> RecordSet:
    """Make random records from (id, is viral, group, kingdom)."""
    rng = np.random.default_rng(0)
    records = tuple(
        LabelledRecord(name, is_virus, group, kingdom=kingdom)
        for name, is_virus, group, kingdom in rows
    )
    lengths = np.full(len(rows), n_bases)
    digits = rng.integers(4, size=lengths.sum()).astype(np.uint8)
    return RecordSet(records, digits, np.cumsum(lengths) - lengths, lengths)


@pytest.fixture(scope="module")
def collection() -> RecordSet:
    """A large and a small group of phages, RNA viruses, and two groups of bacteria."""
    phages = [(f"p{i}", True, "large" if i < 81 else "small", "phages") for i in range(82)]
    others = [("r", True, "rna", "RNA viruses"), ("b", False, "b1", "bacteria")]
    return collection_of([*phages, *others, ("c", False, "b2", "bacteria")])


# Sampling


def test_kingdoms_and_groups_have_even_shares(
    collection: RecordSet,
) -> None:
    fragments = sample_fragments(collection, 300, 8000, SHARES, np.random.default_rng(1))
    sampled = Counter(collection.records[i].group for i in fragments.record)
    n_phages = sampled["large"] + sampled["small"]
    # standard deviation sqrt(8000 * 0.75 * 0.25) = 39; four of them
    assert n_phages == pytest.approx(6000, abs=155)
    assert sampled["rna"] == 8000 - n_phages
    assert sampled["b1"] + sampled["b2"] == 8000
    # 81 times the bases count three times: 81 ** 0.25; four standard deviations of sqrt(1125)
    assert sampled["small"] == pytest.approx(n_phages / 4, abs=134)


def test_fragments_are_windows_on_either_strand(collection: RecordSet) -> None:
    fragments = sample_fragments(collection, 300, 50, SHARES, np.random.default_rng(2))
    strands = Counter()
    for digits, record in zip(fragments.digits, fragments.record, strict=True):
        sequence = collection.sequence(record).tobytes()
        forward = digits.tobytes()
        reverse = (3 - digits[::-1]).tobytes()
        assert (forward in sequence) != (reverse in sequence)
        strands[forward in sequence] += 1
    assert min(strands.values()) > 20  # of 100; fewer have a chance of 1e-10


def test_short_records_are_not_sampled() -> None:
    rows = [("a", True, "a", "phages"), ("b", True, "b", "phages"), ("c", False, "c", "bacteria")]
    uneven = collection_of(rows)
    lengths = np.array([400, 200, 400])
    short = RecordSet(uneven.records, uneven.digits, uneven.starts, lengths)
    fragments = sample_fragments(short, 300, 20, SHARES, np.random.default_rng(0))
    assert set(fragments.record.tolist()) == {0, 2}


def test_labels_weigh_the_same_at_every_gc() -> None:
    rng = np.random.default_rng(3)
    is_virus = rng.random(20_000) < 0.5
    gc = np.where(is_virus, rng.normal(0.42, 0.08, 20_000), rng.normal(0.5, 0.08, 20_000))
    weights = gc_matched_weights(gc, is_virus)
    middle = (gc > 0.35) & (gc < 0.55)
    for low in (0.35, 0.4, 0.45, 0.5):
        inside = middle & (gc >= low) & (gc < low + 0.05)
        by_label = [weights[inside & (is_virus == label)].sum() for label in (False, True)]
        assert by_label[0] == pytest.approx(by_label[1])


# K-mers


@pytest.fixture(scope="module")
def relatives() -> RecordSet:
    """Three groups of viruses and one of cells that share a sequence, and two other groups."""
    rows = [(name, name != "c", name, "phages" if name != "c" else "bacteria") for name in "abcd"]
    shared = collection_of([*rows, ("e", True, "e", "phages"), ("f", False, "f", "bacteria")])
    digits = shared.digits.reshape(6, -1).copy()
    digits[:4] = np.resize(encode("GCAGAAGATTTCAAACTGATGTGGCGTCATGGTTCA"), digits.shape[1])
    digits[:4, ::7] = digits[0, ::7] & 1  # no more a repeat; the same in all four
    return RecordSet(shared.records, digits.reshape(-1), shared.starts, shared.lengths)


def test_words_have_owners_or_samples(relatives: RecordSet) -> None:
    folds = np.array([0, 1, 2, 3, 4, 4])
    counts = count_kmer_groups(relatives, folds)
    is_shared = counts.n_groups.sum(axis=(1, 2)) == 4
    shared = counts.numbers[is_shared]
    alone = counts.numbers[~is_shared]
    in_sample = is_in_sample(shared)
    assert 0 < in_sample.sum() < len(shared)
    owners = {
        (): KmerClass.MOSTLY_VIRAL,
        (0, 1): KmerClass.MOSTLY_CELLULAR,
        (2,): KmerClass.VIRAL,
        (1, 2): KmerClass.VIRAL,
    }
    for left_out, owner in owners.items():
        assert (look_up_classes(counts.table(left_out), shared) == owner).all()
    for left_out, owner in {
        (0, 1, 2): KmerClass.ONE_VIRAL,
        (0, 1, 3): KmerClass.ONE_CELLULAR,
    }.items():
        found = look_up_classes(counts.table(left_out), shared)
        np.testing.assert_array_equal(found, np.where(in_sample, owner, 0))
    assert len(counts.table({0, 1, 2, 3})) == len(alone)
    assert set(look_up_classes(counts.table(), alone)) == {
        KmerClass.ONE_VIRAL,
        KmerClass.ONE_CELLULAR,
    }
    assert is_in_sample(alone).all()


def test_fragment_features_exclude_own_fold(
    relatives: RecordSet,
) -> None:
    rng = np.random.default_rng(10)
    both = relatives.select(np.array([True, True, False, False, True, True]))
    fragments = sample_fragments(both, 300, 20, SHARES, rng)
    folds = np.array([0, 0, 1, 1])
    is_shared = np.isin(fragments.record, [0, 1])
    features = FoldKmerTables.from_counts(count_kmer_groups(both, folds)).compute_features(
        fragments, folds
    )
    assert not features[:, WindowFeatures.KMERS].any()  # all that share them are in a fold
    seen = fragment_features(fragments.digits, count_kmer_groups(both, folds).table())
    np.testing.assert_array_equal(seen[:, WindowFeatures.KMERS.start] > 0, is_shared)
    assert is_shared.any()


def test_genes_move_no_fold(
    tmp_path: Path,
) -> None:
    kingdoms = {
        "phages": "virus",
        "bacteria": "other",
        "transcripts": "other",
        ARCHAEAL_GENES: "other",
    }
    bases = "".join(np.random.default_rng(7).choice([*"ACGT"], 600))
    rows = {
        kingdom: [f"all.fa\t{kingdom[0]}{i}\t{label}\t{kingdom} {i}\t{kingdom}" for i in range(13)]
        for kingdom, label in kingdoms.items()
    }
    names = [row.split("\t")[1] for kingdom_rows in rows.values() for row in kingdom_rows]
    (tmp_path / "all.fa").write_text("".join(f">{name}\n{bases}\n" for name in names))
    genes, manifest, split = (tmp_path / name for name in ("genes.tsv", "data.tsv", "split.tsv"))
    header = "path\tid\tlabel\tgroup\tkingdom"
    gene_rows = rows.pop(ARCHAEAL_GENES)
    genes.write_text("\n".join([header, *gene_rows]))
    data_rows = [row for kingdom_rows in rows.values() for row in kingdom_rows]
    manifest.write_text("\n".join([header, *data_rows]))
    groups = [row.split("\t")[3] for row in data_rows]
    split.write_text("\n".join(["group\tpart", *(f"{group}\ttrain" for group in groups)]))
    data = LabelledData.read(manifest, genes, split, ["train"])
    alone = collect_records(read_split_records(manifest, split, ["train"]))
    fold_of_group = assign_folds(alone.records)
    folds = np.array([fold_of_group[record.group] for record in alone.records])
    np.testing.assert_array_equal(data.fold_of_record[: len(folds)], folds)
    assert set(data.fold_of_record[len(folds) :].tolist()) == set(range(N_FOLDS))
    counts = count_kmer_groups(alone, folds)
    np.testing.assert_array_equal(data.counts.numbers, counts.numbers)
    np.testing.assert_array_equal(data.counts.n_groups, counts.n_groups)
    assert len(counts.numbers)
    training_data = data.exclude_folds({3, 4})
    rng = np.random.default_rng(8)
    assert not np.isin(training_data.fold_of_record, [3, 4]).any()
    for scheme, is_sampled in ((GC_MATCHED, False), (WITH_ARCHAEAL_GENES, True)):
        sampled = sample_fragments(training_data.collection, 300, 500, scheme.shares, rng)
        sampled_kingdoms = {training_data.collection.records[i].kingdom for i in sampled.record}
        assert (ARCHAEAL_GENES in sampled_kingdoms) is is_sampled


# Artificial negatives


@pytest.mark.parametrize("kind", NEGATIVE_KINDS)
@pytest.mark.parametrize("n_bases", [150, 1000])
def test_artificial_sequences_keep_the_length(kind: str, n_bases: int) -> None:
    rng = np.random.default_rng(4)
    sequence = make_negative(kind, n_bases, rng.integers(4, size=n_bases).astype(np.uint8), rng)
    assert sequence.shape == (n_bases,)
    assert sequence.dtype == np.uint8
    assert sequence.max() < 4


def test_shuffling_keeps_dinucleotides() -> None:
    rng = np.random.default_rng(5)
    sequence = encode("AACG" * 5000)
    shuffled = shuffle_dinucleotides(sequence, rng)
    before, after = (
        np.bincount(4 * digits[:-1].astype(np.int64) + digits[1:], minlength=16)
        for digits in (sequence, shuffled)
    )
    # binomial: at most sqrt(20000) / 2 = 71 each; five of them
    np.testing.assert_allclose(after, before, rtol=0, atol=354)
    assert (shuffled != sequence).mean() > 0.5


# Fitting


def biased(n: int, codon: str, rng: np.random.Generator) -> Digits:
    """Make fragments of 150 bases in which every third codon is this one."""
    digits = rng.integers(4, size=(n, 50, 3)).astype(np.uint8)
    digits[:, ::3] = encode(codon)
    return digits.reshape(n, 150)


def test_nets_learn_several_kinds() -> None:
    rng = np.random.default_rng(7)
    codons = ("GCA", "AAC", "CTG", "TTC")  # the first two are viruses'
    kinds = np.repeat(np.arange(4), 200)
    digits = np.concatenate([biased(200, codon, rng) for codon in codons])
    training_set = TrainingSet(fragment_features(digits, NO_KMERS), kinds, np.ones(800), 2, 4)
    config = TrainingConfig(batch_size=50, epochs=4)
    nets = fit_piece_networks(PieceRange(150, 150), [training_set, training_set], NO_KMERS, config)
    assert nets.nets.centre.shape == (WindowFeatures.N_FEATURES,)
    held_out = np.concatenate([biased(50, codon, rng) for codon in codons])
    log_odds = fragment_log_odds(held_out, [nets])
    assert ((log_odds > 0) == (np.arange(200) < 100)).mean() > 0.95
    (share_stack, n_viral), (ratio_stack, n_of_two) = nets.nets.stacks.values()
    # a network for each training set; one view distinguishes kinds, the other does not
    assert (share_stack[-1][1].shape, n_viral) == ((2, 4), 2)
    assert (ratio_stack[-1][1].shape, n_of_two) == ((2, 2), 1)


def test_prokaryote_net_moves_similar_records(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(7)
    codons = ("GCA", "AAC", "CTG", "TTC")  # phages, other viruses, bacteria, other cells
    kinds = np.repeat(np.arange(4), 200)
    features = fragment_features(
        np.concatenate([biased(200, codon, rng) for codon in codons]), NO_KMERS
    )
    training_set = TrainingSet(features, kinds, np.ones(800), 2, 4)
    opposite = replace(training_set, kind=(kinds + 2) % 4)
    config = TrainingConfig(batch_size=50, epochs=8)
    bases = PieceRange(150, 150)
    with_it = fit_piece_networks(bases, [training_set], NO_KMERS, config, opposite)
    usual = fit_piece_networks(bases, [training_set], NO_KMERS, config)
    held_out = np.concatenate([biased(50, codon, rng) for codon in codons])
    moved = fragment_log_odds(held_out, [with_it]) - fragment_log_odds(held_out, [usual])
    phages, viruses, bacteria, cells = np.median(moved.reshape(4, 50), axis=1)
    assert phages < 5 * -abs(viruses) and bacteria > 5 * abs(cells)
    scorer = replace(make_scorer(SHORT, LONG), pieces=(with_it,))
    save_scorer(tmp_path / "scorer.safetensors", scorer)
    loaded = load_scorer(tmp_path / "scorer.safetensors").pieces
    np.testing.assert_array_equal(
        fragment_log_odds(held_out, loaded), fragment_log_odds(held_out, [with_it])
    )


def test_dropout_spares_named_features() -> None:
    rng = np.random.default_rng(11)
    features = rng.normal(size=(400, WindowFeatures.N_FEATURES)).astype(np.float32)
    kinds = (features[:, WindowFeatures.GC] <= 0).astype(np.int64)
    training_set = TrainingSet(features, kinds, np.ones(400), 1, 2)
    config = TrainingConfig(
        input_dropout=1.0,
        no_dropout=range(WindowFeatures.GC, WindowFeatures.GC + 1),
        batch_size=50,
        epochs=20,
    )
    nets = fit_piece_networks(PieceRange(150, 150), [training_set], NO_KMERS, config)
    others = rng.normal(size=(200, WindowFeatures.N_FEATURES)).astype(np.float32)
    others[:, : WindowFeatures.GC] = others[:, WindowFeatures.GC + 1 :] = (
        0  # the net's first weights for these are still there
    )
    assert ((nets.nets.log_odds(others) > 0) == (others[:, WindowFeatures.GC] > 0)).mean() > 0.9


def test_folds_share_no_group() -> None:
    rows = [
        (f"{kingdom}{i}", kingdom == "phages", f"{kingdom} {i // 2}", kingdom)
        for kingdom in ("phages", "bacteria")
        for i in range(4 * N_FOLDS)
    ]
    folds = assign_folds(collection_of(rows).records)
    assert len(folds) == 4 * N_FOLDS
    for kingdom in ("phages", "bacteria"):
        inside = Counter(fold for group, fold in folds.items() if group.startswith(kingdom))
        assert inside == dict.fromkeys(range(N_FOLDS), 2)
    elements = [(f"e{i}", False, f"bacteria {i % 3}", ELEMENTS) for i in range(30)]
    assert assign_folds(collection_of([*elements, *rows]).records) == folds


def test_knot_recovers_slope_and_offset() -> None:
    rng = np.random.default_rng(7)
    log_odds = rng.normal(0, 3, 100_000)
    is_virus = rng.random(len(log_odds)) < 1 / (1 + np.exp(-(0.5 * log_odds + 1)))
    knot = fit_knot(500, log_odds, is_virus)
    # labels weigh the same, which takes their log odds off the offset
    prior = np.log(is_virus.mean() / (1 - is_virus.mean()))
    # standard errors of about 0.01
    assert (knot.slope, knot.offset) == pytest.approx((0.5, 1 - prior), abs=0.04)


def test_error_rates_are_shares_of_labels() -> None:
    rng = np.random.default_rng(8)
    is_virus = rng.random(40_000) < 0.3
    log_odds = rng.normal(np.where(is_virus, 3.0, -1.0), 1.0)
    rates = fit_error_rates(500, log_odds, is_virus)
    for cut, false, true in zip(
        rates.log_odds, rates.false_positives, rates.true_positives, strict=True
    ):
        assert (log_odds[~is_virus] > cut).mean() == pytest.approx(false, abs=1e-4)
        assert (log_odds[is_virus] > cut).mean() == pytest.approx(
            true, abs=2e-4
        )  # one more of 12,000
    threshold = rates.threshold_at(0.03)
    assert threshold == pytest.approx(-1 + 1.881, abs=0.06)  # the normal's; standard error 0.015


def test_threshold_limits_each_kind_of_cells() -> None:
    rng = np.random.default_rng(9)
    kind = rng.integers(3, size=60_000)  # 0: viruses; cells of kind 2 look more like them
    log_odds = rng.normal(np.array([3.0, -1.0, 0.0])[kind], 1.0)
    kinds = [kind == 1, kind == 2]
    plain = fit_error_rates(500, log_odds, kind == 0)
    rates = raise_thresholds(plain, log_odds, [(kinds[0], 1.0), (kinds[1], 1.0)])
    assert plain.cuts == plain.log_odds == rates.log_odds
    for share in (0.1, 0.03, 0.005):
        called = log_odds >= rates.threshold_at(share)
        assert called[kind != 0].mean() < share
        # but for one fragment of 20,000
        assert called[kinds[1]].mean() == pytest.approx(share, abs=1e-4)
        assert called[kinds[0]].mean() < share
    assert rates.true_positives == plain.true_positives
    lenient = raise_thresholds(plain, log_odds, [(kinds[0], 1.0), (kinds[1], 1.2)])
    for share in (0.1, 0.03, 0.005):
        called = log_odds >= lenient.threshold_at(share)
        assert called[kinds[1]].mean() == pytest.approx(1.2 * share, abs=1e-4)


def test_kind_of_cells_needs_enough_groups() -> None:
    rows = [(f"b{i}", False, f"b{i}", "bacteria") for i in range(MIN_GROUPS)]
    rows += [(f"f{i}", False, f"f{i}", "fungi") for i in range(MIN_GROUPS - 1)]
    collection = collection_of([*rows, ("v", True, "v", "phages")])
    n_bases = int(collection.lengths[0]) // 2
    sampled = np.repeat(np.arange(len(rows) + 1), [4] + [1] * len(rows))
    fragments = Fragments(np.zeros((len(sampled), n_bases), np.uint8), sampled)
    inside = np.ones(len(sampled), dtype=np.bool_)
    kinds = cell_kind_masks(collection, fragments, inside)
    assert list(kinds) == ["bacteria"]
    # two of the first one's four
    assert np.flatnonzero(kinds["bacteria"]).tolist() == [0, 1, 4, 5, 6, 7]
    inside[4] = False
    assert list(cell_kind_masks(collection, fragments, inside)) == []


def test_kind_of_cells_counts_where_most_of_it_is() -> None:
    rows = [(f"b{i}", False, f"b{i}", "bacteria") for i in range(20)]
    collection = collection_of(rows)
    fragments = Fragments(np.zeros((len(rows), 20), np.uint8), np.arange(len(rows)))
    inside = np.arange(20) < 8
    assert cell_kind_masks(collection, fragments, inside) == {}
    assert (
        cell_kind_masks(collection, fragments, ~inside)["bacteria"].tolist() == (~inside).tolist()
    )


def test_rare_lengths_borrow_thresholds() -> None:
    shares = (0.1, 0.01, 0.001)
    true_positives = (0.9, 0.5, 0.1)
    lengths = (100, 500, 999, 1000, 5000, 20_000)
    odds = [np.arange(3.0) - place for place in range(len(lengths))]

    def found(powers: list[float]) -> list[float]:
        """Return thresholds and margins, as powers of ten, that start from these."""
        rates = [
            ErrorRates(n, tuple(at), shares, true_positives, (*(at + power)[:2], at[2]))
            for n, at, power in zip(lengths, odds, powers, strict=True)
        ]
        even = smooth_error_rates(rates, [np.full(3, 10**power) for power in powers])
        left = [one.cuts[0] - one.log_odds[0] for one in even]
        assert [one.cuts[1] - one.log_odds[1] for one in even] == pytest.approx(left)
        for one, power in zip(even, left, strict=True):
            fewer = np.divide(true_positives, one.true_positives)
            assert np.log10(fewer) == pytest.approx(np.full(3, power))
        return left

    assert found([0.2] * 6) == pytest.approx([0.2] * 6)
    # 999 and 1,000 bases are one length
    assert found([0.2, 0.2, 0.9, 0.9, 0.2, 0.2]) == pytest.approx([0.2] * 6)
    rising = found([0.0, 0.1, 0.2, 0.2, 0.3, 0.4])
    assert (np.diff(rising) > 0).all()
    assert rising[3] - rising[2] < 0.001 < rising[1] - rising[0]


def test_margin_allows_for_noisier_groups() -> None:
    rng = np.random.default_rng(10)
    is_virus = rng.random(40_000) < 0.5
    group = rng.integers(40, size=len(is_virus))
    records = [
        LabelledRecord(str(row), bool(virus), f"{virus}{one}", kingdom=f"{virus}{one % 2}")
        for row, (virus, one) in enumerate(zip(is_virus, group, strict=True))
    ]
    alike = rng.normal(np.where(is_virus, 2.0, 0.0), 1.0)
    uneven = alike + 3 * (group == 7) * ~is_virus  # of one group in twenty of its kingdom
    margins = []
    for log_odds in (alike, uneven):
        rates = fit_error_rates(500, log_odds, is_virus)
        margins.append(bootstrap_margin(rates, log_odds, records, rng))
        assert (margins[-1] >= 1).all()
    # at 1 %: 200 fragments, whose number has a standard deviation of 7 %; 1.28 of them
    assert margins[0][7] == pytest.approx(1.09, abs=0.06)
    # nearly all of them are of the one group, which two draws or more take in 0.26 of all
    assert margins[1][7] == pytest.approx(2, abs=0.3)


def test_thresholds_above_their_rate_are_refused() -> None:
    for cuts in ((1.0, 0.5), (0.0, 3.0)):
        with pytest.raises(ValueError, match="cuts fall"):
            ErrorRates(500, (1.0, 2.0), (0.1, 0.01), (0.8, 0.4), cuts)


def make_scorer(*rates: ErrorRates) -> Scorer:
    nets = fit_piece_networks(
        PieceRange(150, 150),
        [coin_training_set()],
        NO_KMERS,
        TrainingConfig(batch_size=50, epochs=1),
    )
    knot = Knot(150, 1.0, 0.0)
    kingdoms = Kingdom("first", (0,), rates), Kingdom("second", (1,), rates[1:])
    return Scorer((nets,), nets, knot, (knot,), "coins", rates, kingdoms)


SHORT = ErrorRates(100, (1.0, 2.0, 3.0), (0.1, 0.01, 0.001), (0.8, 0.4, 0.01), (1.0, 2.0, 3.0))
LONG = ErrorRates(10_000, (-2.0, -1.0, 0.0), (0.1, 0.01, 0.001), (1.0, 0.9, 0.5), (-2.0, -1.0, 0.0))


def test_thresholds_are_linear_in_logarithms(tmp_path: Path) -> None:
    saved = make_scorer(SHORT, LONG)
    save_scorer(tmp_path / "scorer.safetensors", saved)
    scorer = load_scorer(tmp_path / "scorer.safetensors")
    assert scorer.error_rates == saved.error_rates
    assert scorer.kingdoms == saved.kingdoms
    lengths = np.array([0, 50, 100, 1000, 10_000, 5_000_000])
    values = thresholds(scorer.error_rates, lengths, 0.01)
    np.testing.assert_allclose(values, [2, 2, 2, 0.5, -1, -1], rtol=0, atol=1e-12)
    between = thresholds(scorer.error_rates, lengths, 10**-1.5)
    np.testing.assert_allclose(between, [1.5, 1.5, 1.5, 0, -1.5, -1.5], rtol=0, atol=1e-12)


def test_fdr_follows_from_prevalence_and_rates() -> None:
    scorer = make_scorer(SHORT, LONG)
    log_odds = np.array([1.0, 2.0, 1.5, 9.0])
    lengths = np.array([100, 100, 10, 100])
    found = false_discovery_rates(scorer.error_rates, log_odds, lengths, 0.2)
    # F / T is 1/8, 1/40 and 1/10, which does not count: it never rises
    ratios = np.array([1 / 8, 1 / 40, np.sqrt(1 / 8 / 40), 1 / 40])
    expected = 0.8 * ratios / (0.8 * ratios + 0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    (between,) = false_discovery_rates(scorer.error_rates, np.array([0.0]), np.array([1000]), 0.5)
    ratio = np.sqrt(1 / 8 * 0.001 / 0.5)  # halfway, over the logarithm of the length
    assert between == pytest.approx(ratio / (1 + ratio))


def test_higher_score_never_has_higher_fdr() -> None:
    scorer = make_scorer(SHORT, LONG)
    for n_bases in (10, 100, 700, 3000, 10**6):
        log_odds = np.linspace(-5, 5, 101)
        rates = false_discovery_rates(scorer.error_rates, log_odds, np.full(101, n_bases), 0.05)
        assert (np.diff(rates) <= 0).all()


def coin_training_set() -> TrainingSet:
    rng = np.random.default_rng(9)
    features = rng.normal(size=(100, WindowFeatures.N_FEATURES)).astype(np.float32)
    return TrainingSet(features, rng.integers(2, size=100), np.ones(100), 1, 2)
