"""Read what a page shows about viruses: proviruses, lineages by sample, and maps of genes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from virnucpro.core.helper_pool import TaskRunner
from virnucpro.results.counts import LENGTH_CLASSES
from virnucpro.results.outputs import RunOutput
from virnucpro.results.report.aggregates import CountTask, cross_table
from virnucpro.results.report.run_json import Key
from virnucpro.results.table_blocks import NO_OLD_NAMES, TableBlock, split_table

NO_CLASS = "no class named"
# Viruses by group and start of the length class, and by family. Proteins have the group "".
GroupCounts: TypeAlias = tuple[Counter[tuple[str, int]], Counter[str]]


class ListedVirus(NamedTuple):
    """A virus in the first table of the page."""

    record: str  # name of the provirus, or id of the record
    file: str
    extent: str
    length: int
    score: float
    rate: float  # NaN: not measured
    evidence: str
    group: str
    family: str
    note: str


class _GeneRow(NamedTuple):
    """A gene, as the map shows it."""

    name: str
    start: int
    end: int
    strand: str
    log_odds: float  # NaN: too short
    n_known_kmers: int
    family: str


class GeneArrow(NamedTuple):
    """A gene in a map: its shape, its style class, and its description."""

    path: str
    css_class: str
    text: str


class GeneMap(NamedTuple):
    """The genes of a virus, as arrows above (forward) and below (reverse) its axis."""

    virus: str
    length: int
    n_genes: int
    arrows: Sequence[GeneArrow]


class SampleBar(NamedTuple):
    """The viruses of a sample by class, as a stacked bar."""

    sample: str
    n: int
    parts: Sequence[tuple[str, float, float, str]]  # style class, start, width, description


class LineageBars(NamedTuple):
    bars: Sequence[SampleBar]
    legend: Sequence[tuple[str, str]]  # style class, name
    n_more: int  # samples without a bar


def best_proviruses(table: Path, n: int, helpers: TaskRunner[None]) -> list[ListedVirus]:
    """Return the proviruses with the highest posteriors.

    Raises:
        InputError: the table is damaged.
        OSError: the table cannot be read.
    """
    spans = split_table(table, RunOutput.VIRUS_TABLE.old_names)
    find = partial(_proviruses_in, n)
    found = chain.from_iterable(helpers.map_in_order(CountTask(span, find) for span in spans))
    return sorted(found, key=attrgetter("score"), reverse=True)[:n]


def _proviruses_in(n: int, block: TableBlock) -> list[ListedVirus]:
    chosen = np.flatnonzero(block.has_columns("extent", b"provirus"))
    scores = block.numbers("score")
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:n]]
    names = ("virus", "file", "group", "family", "note")
    rows = zip(*block.columns(names, chosen), strict=True)
    lengths = block.integers("length")[chosen].tolist()
    values = scores[chosen].tolist()
    return [
        ListedVirus(
            record=virus,
            file=file,
            extent="provirus",
            length=length,
            score=score,
            rate=float("nan"),
            evidence="",
            group=group,
            family=family,
            note=note,
        )
        for (virus, file, group, family, note), length, score in zip(
            rows, lengths, values, strict=True
        )
    ]


# Lineages


def count_classes(table: Path, helpers: TaskRunner[None]) -> Counter[tuple[str, str]]:
    """Count viruses by file and class. A virus without a group, such as a protein, is left out.

    Raises:
        InputError: the table is damaged.
        OSError: the table cannot be read.
    """
    spans = split_table(table, RunOutput.VIRUS_TABLE.old_names)
    counts = Counter[tuple[str, str]]()
    for block_counts in helpers.map_in_order(CountTask(span, _classes_in) for span in spans):
        counts.update(block_counts)
    return counts


def _classes_in(block: TableBlock) -> Counter[tuple[str, str]]:
    rows = zip(*block.columns(("file", "taxonomy", "group")), strict=True)
    return Counter((file, class_of(taxonomy)) for file, taxonomy, group in rows if group)


def class_of(taxonomy: str) -> str:
    """Return the class in a lineage.

    >>> class_of("Viruses;Duplodnaviria;Heunggongvirae;Uroviricota;Caudoviricetes;;")
    'Caudoviricetes'
    """
    class_field = 5  # of ``taxonomy``, after the root, realm, kingdom and phylum
    names = taxonomy.split(";")
    return (names[class_field - 1] if len(names) >= class_field else "") or NO_CLASS


def lineage_bars(counts: Mapping[tuple[str, str], int]) -> LineageBars | None:
    """Stack the viruses of each sample by class, the most frequent classes first."""
    max_classes = 7  # in the bars, besides all others
    max_samples = 40  # bars
    totals = Counter[str]()
    by_sample: dict[str, Counter[str]] = defaultdict(Counter)
    for (sample, name), n in counts.items():
        totals[name] += n
        by_sample[sample][name] += n
    if not totals:
        return None
    named = sorted(totals, key=lambda name: (name == NO_CLASS, -totals[name], name))
    shown = [name for name in named[:max_classes] if name != NO_CLASS]
    has_others = any(name not in shown and name != NO_CLASS for name in named)
    ends = [*(["other classes"] if has_others else []), *([NO_CLASS] if totals[NO_CLASS] else [])]
    legend = [(f"k{index}", name) for index, name in enumerate(shown)]
    legend += [("k7" if name != NO_CLASS else "k8", name) for name in ends]
    samples = list(by_sample)
    bars = [_sample_bar(sample, by_sample[sample], legend) for sample in samples[:max_samples]]
    return LineageBars(bars, legend, len(samples) - len(bars))


def _sample_bar(sample: str, counts: Counter[str], legend: Sequence[tuple[str, str]]) -> SampleBar:
    bar_width = 1000.0
    total = counts.total()
    shown = {name for _, name in legend}
    n_others = sum(n for name, n in counts.items() if name not in shown)
    parts = []
    start = 0.0
    for css_class, name in legend:
        n = n_others if name == "other classes" else counts[name]
        if n:
            width = bar_width * n / total
            parts.append((css_class, start, width, f"{name}: {n:,}"))
            start += width
    return SampleBar(sample, total, parts)


# Genes


def read_gene_maps(
    table: Path, viruses: Sequence[ListedVirus], helpers: TaskRunner[None]
) -> list[GeneMap]:
    """Return the gene maps of viruses that have genes, in their order. The table may be missing.

    Raises:
        InputError: the table is damaged.
        OSError: the table cannot be read.
    """
    wanted = {(virus.file, virus.record) for virus in viruses}
    if not wanted:
        return []
    find = partial(_genes_in, wanted)
    genes: dict[tuple[str, str], list[_GeneRow]] = defaultdict(list)
    tasks = (CountTask(span, find) for span in split_table(table))
    for key, row in chain.from_iterable(helpers.map_in_order(tasks)):
        genes[key].append(row)
    return [
        _gene_map(virus, genes[virus.file, virus.record])
        for virus in viruses
        if (virus.file, virus.record) in genes
    ]


def _genes_in(
    wanted: Collection[tuple[str, str]], block: TableBlock
) -> list[tuple[tuple[str, str], _GeneRow]]:
    columns = [block.texts("file"), block.texts("record"), block.texts("virus")]
    keys = [
        (file, record if (file, record) in wanted else virus)
        for file, record, virus in zip(*columns, strict=True)
    ]
    rows = [row for row, key in enumerate(keys) if key in wanted]
    log_odds = block.numbers("log_odds")[rows].tolist()
    n_known = block.integers("n_known_kmers")[rows].tolist()
    starts = block.integers("start")[rows].tolist()
    ends = block.integers("end")[rows].tolist()
    texts = zip(*block.columns(("gene", "strand", "known_family"), rows), strict=True)
    found = []
    for row, start, end, odds, n, (name, strand, family) in zip(
        rows, starts, ends, log_odds, n_known, texts, strict=True
    ):
        found.append((keys[row], _GeneRow(name, start, end, strand, odds, n, family)))
    return found


def _gene_map(virus: ListedVirus, genes: Sequence[_GeneRow]) -> GeneMap:
    arrows = list(chain.from_iterable(_arrows(virus.length, gene) for gene in genes))
    return GeneMap(virus.record, virus.length, len(genes), arrows)


def _arrows(length: int, gene: _GeneRow) -> Iterator[GeneArrow]:
    """Yield one arrow, or two for a gene that crosses the origin of a circle."""
    css_class = "gene-cell" if gene.log_odds < 0 else "gene-virus"
    if np.isnan(gene.log_odds):
        css_class = "gene-short"
    if gene.n_known_kmers:
        css_class += " gene-known"
    odds = "" if np.isnan(gene.log_odds) else f", log-odds {gene.log_odds:.2f}"
    family = f", {gene.family}" if gene.family else ""
    text = (
        f"{gene.name}: {gene.start:,}-{gene.end:,} ({gene.strand}){odds}, "
        f"{gene.n_known_kmers:,} k-mers of known viruses{family}"
    )
    parts = [(gene.start, gene.end)]
    if gene.start > gene.end:
        parts = [(gene.start, length), (1, gene.end)]
    for start, end in parts:
        yield GeneArrow(_arrow_path(length, start, end, gene.strand), css_class, text)


def _arrow_path(length: int, start: int, end: int, strand: str) -> str:
    map_width = 1000.0
    forward = (4, 16)  # top and bottom of an arrow
    reverse = (20, 32)
    scale = map_width / max(1, length)
    left = (start - 1) * scale
    right = end * scale
    tip_width = 8.0
    tip = min(tip_width, right - left)
    top, bottom = forward if strand == "+" else reverse
    middle = (top + bottom) / 2
    if strand == "+":
        shoulder = right - tip
        return (
            f"M{left:.1f} {top}H{shoulder:.1f}L{right:.1f} {middle:g}L{shoulder:.1f} {bottom}"
            f"H{left:.1f}z"
        )
    shoulder = left + tip
    return (
        f"M{right:.1f} {top}H{shoulder:.1f}L{left:.1f} {middle:g}L{shoulder:.1f} {bottom}"
        f"H{right:.1f}z"
    )


# Groups, and columns of some records


def find_records(
    table: Path,
    wanted: Collection[Key],
    columns: Sequence[str],
    helpers: TaskRunner[None],
    old_names: Mapping[str, str] = NO_OLD_NAMES,
) -> dict[Key, tuple[str, ...]]:
    """Look up some columns for some records.

    Raises:
        InputError: the table is damaged.
        OSError: the table cannot be read.
    """
    if not wanted:
        return {}
    find = partial(_select_records, wanted, columns)
    matches = helpers.map_in_order(CountTask(span, find) for span in split_table(table, old_names))
    return dict(chain.from_iterable(matches))


def _select_records(
    wanted: Collection[Key], columns: Sequence[str], block: TableBlock
) -> list[tuple[Key, tuple[str, ...]]]:
    ids = {record for _, record in wanted}
    rows = [row for row, record in enumerate(block.texts("record")) if record in ids]
    keys = zip(*block.columns(("file", "record"), rows), strict=True)
    values = zip(*block.columns(columns, rows), strict=True)
    return [pair for pair in zip(keys, values, strict=True) if pair[0] in wanted]


def count_groups(table: Path, helpers: TaskRunner[None]) -> GroupCounts:
    """Count viruses by group and by family.

    Raises:
        InputError: the table is damaged.
        OSError: the table cannot be read.
    """
    groups: Counter[tuple[str, int]] = Counter()
    families: Counter[str] = Counter()
    for block_groups, block_families in helpers.map_in_order(
        CountTask(span, _count_groups_of_block)
        for span in split_table(table, RunOutput.VIRUS_TABLE.old_names)
    ):
        groups.update(block_groups)
        families.update(block_families)
    del families[""]
    return groups, families


def _count_groups_of_block(block: TableBlock) -> GroupCounts:
    groups = Counter[tuple[str, int]]()
    classes = np.digitize(block.integers("length"), LENGTH_CLASSES[1:])
    names, group_codes = block.codes("group")
    families, family_codes = block.codes("family")
    n_by_class = cross_table(group_codes, classes, (len(names), len(LENGTH_CLASSES)))
    for name, counts in zip(names, n_by_class, strict=True):
        groups.update({(name, start): n for start, n in zip(LENGTH_CLASSES, counts, strict=True)})
    n_by_family = np.bincount(family_codes).tolist()
    return groups, Counter(dict(zip(families, n_by_family, strict=True)))
