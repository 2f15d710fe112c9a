"""Make the sections of a page that only predictions have: viruses, groups, scores, regions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

from virnucpro.results.counts import LENGTH_CLASSES
from virnucpro.results.outputs import RunOutput
from virnucpro.results.report.aggregates import length_classes
from virnucpro.results.report.page_regions import (
    ListedRecord,
    first_regions,
    read_page_regions,
    region_data,
    select_listed,
)
from virnucpro.results.report.run_files import RunFiles, Sections
from virnucpro.results.report.run_json import Key
from virnucpro.results.report.score_chart import scores_by_length
from virnucpro.results.report.virus_rows import (
    GroupCounts,
    ListedVirus,
    best_proviruses,
    count_classes,
    count_groups,
    find_records,
    lineage_bars,
    read_gene_maps,
)

_N_TOP = 20  # best viral records in the list


class _VirusFiles(NamedTuple):
    """What the sections need from the tables of a prediction."""

    n_regions: Counter[Key]
    listed: list[ListedRecord]  # best first
    groups: GroupCounts
    identities: Mapping[Key, tuple[str, ...]]  # group and family of the best viral records
    evidences: Mapping[Key, tuple[str, ...]]  # why these are called
    proviruses: list[ListedVirus]  # best first
    classes: Mapping[tuple[str, str], int]  # viruses by file and class


def make_virus_sections(run: RunFiles) -> Sections:
    """Make the sections for a run.

    Raises:
        InputError: a table is damaged.
    """
    files = _read_files(run)
    content = {
        "best": _best(run, files) if run.has_table else None,
        "classes": _length_rows(run),
        "has_fdr": not all(math.isnan(rate) for _, rate in run.counts.lowest),
        "groups": _group_rows(files.groups) if run.has_table else None,
        "lineages": lineage_bars(files.classes),
        "scores": scores_by_length(run.counts, run.rows, run.facts.cut, run.letters),
        "regions": first_regions(files.listed),
    }
    data = region_data(files.listed, run.rundir.output(RunOutput.TRACKS.file))
    return Sections(content, data, files.n_regions)


def _read_files(run: RunFiles) -> _VirusFiles:
    rundir = run.rundir
    helpers = run.helpers
    n_regions, listed = read_page_regions(rundir.output(RunOutput.REGION_TABLE.file))
    viruses = rundir.output(RunOutput.VIRUS_TABLE.file)
    table = rundir.record_table("predict")
    top = run.rows.best(_N_TOP)
    best = set(zip(top.files, top.records, strict=True))
    sizes = find_records(table, set(listed), ("length", "virus_score"), helpers)
    return _VirusFiles(
        n_regions=n_regions,
        listed=list(select_listed(listed, sizes)) if run.has_table else [],
        groups=count_groups(viruses, helpers),
        identities=find_records(
            viruses, best, ("group", "family"), helpers, RunOutput.VIRUS_TABLE.old_names
        ),
        evidences=find_records(table, best, ("evidence",), helpers),
        proviruses=best_proviruses(viruses, _N_TOP, helpers),
        classes=count_classes(viruses, helpers),
    )


def _best(run: RunFiles, files: _VirusFiles) -> dict[str, object]:
    """Describe the best viruses."""
    top = _best_viruses(run, files)
    has_regions = run.rundir.output(RunOutput.REGION_TABLE.file).is_file()
    return {
        "n_within": files.n_regions.total(),
        "looked_for_regions": has_regions or run.facts.section("counts").get("n_regions") == 0,
        "top": top,
        "n_viruses": run.counts.n_viral + run.facts.number("counts", "n_proviruses"),
        "has_fdr": not all(math.isnan(virus.rate) for virus in top),
        "has_groups": any(virus.group for virus in top),
        "has_evidence": any(virus.evidence for virus in top),
        "has_proviruses": any(virus.extent == "provirus" for virus in top),
        "gene_maps": read_gene_maps(run.rundir.output(RunOutput.GENE_TABLE.file), top, run.helpers),
    }


def _best_viruses(run: RunFiles, files: _VirusFiles) -> list[ListedVirus]:
    """Return the records and proviruses with the highest scores, those of proviruses posteriors."""
    top = run.rows.best(_N_TOP)
    columns = (top.records, top.files, top.lengths, top.scores, top.rates, top.notes)
    viruses = []
    for record, file, length, score, rate, note in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        group, family = files.identities.get((file, record), ("", ""))
        (evidence,) = files.evidences.get((file, record), ("",))
        virus = ListedVirus(
            record=record,
            file=file,
            extent="whole",
            length=length,
            score=score,
            rate=rate,
            evidence=evidence,
            group=group,
            family=family,
            note=note,
        )
        viruses.append(virus)
    best = [*viruses, *files.proviruses]
    return sorted(best, key=attrgetter("score"), reverse=True)[:_N_TOP]


def _length_rows(run: RunFiles) -> list[tuple[object, ...]]:
    """Make a row for each length class that has records.

    Columns: name, records, scored records, viral records and their letters, the lowest viral score,
    the false call share down to it, and whether that share is high.
    """
    high_fdr = 0.2  # a length class with this share of false calls is called weak
    classes = zip(
        length_classes(run.counts.starts),
        run.counts.class_counts.tolist(),
        run.counts.lowest,
        strict=True,
    )
    return [
        (name, *numbers, score, rate, rate >= high_fdr)
        for (_, _, name), numbers, (score, rate) in classes
        if numbers[0]
    ]


def _group_rows(counts: GroupCounts) -> dict[str, object] | None:
    """Count viruses by group and length, and list the most frequent families and clusters."""
    groups, named = counts
    totals: Counter[str] = Counter()
    for (group, _), n in groups.items():
        totals[group] += n
    del totals[""]  # proteins, and viruses without bases
    if not totals:
        return None
    max_bars = 20
    families = sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
    return {
        "lengths": [name for _, _, name in length_classes(LENGTH_CLASSES)],
        "rows": [
            (group, n, [groups[group, start] for start in LENGTH_CLASSES])
            for group, n in sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        "families": [(name, n, 100 * n / families[0][1]) for name, n in families[:max_bars]],
        "n_families": len(families),
        "n_named": named.total(),
        "n": totals.total(),
    }
