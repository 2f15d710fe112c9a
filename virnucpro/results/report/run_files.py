"""Read what the page of any run needs from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from virnucpro.core.helper_pool import TaskRunner
from virnucpro.core.recipe import Command
from virnucpro.engine.device_timeline import DeviceTimeline
from virnucpro.results.report.aggregates import RecordRows, RunCounts, count_records
from virnucpro.results.report.run_json import Key, RunJson, read_complaints
from virnucpro.store.run_dir import RunDir


class RunFiles(NamedTuple):
    """A run folder's content, as far as the page needs it."""

    rundir: RunDir
    facts: RunJson
    has_table: bool  # False: the run has written no table of records yet
    counts: RunCounts
    starts: list[DeviceTimeline]
    complaints: Mapping[str, int]
    rows: RecordRows  # the rows for the page, if they fit
    helpers: TaskRunner[None]

    @property
    def command(self) -> Command:
        return "extract" if self.facts.text("recipe", "command") == "extract" else "predict"

    @property
    def families(self) -> set[str]:
        """The encoder families. Empty: only the scorer ran."""
        return {encoder.text("family") for encoder in self.facts.iter_section("recipe", "encoders")}

    @property
    def is_protein(self) -> bool:
        return self.facts.text("recipe", "input_type") == "protein"

    @property
    def letters(self) -> str:
        return "residues" if self.is_protein else "bases"


def read_run(rundir: RunDir, helpers: TaskRunner[None]) -> RunFiles:
    """Read what the page needs from a run folder.

    Raises:
        InputMissingError, ResumeError, InputError: as ``write_run_page``.
    """
    facts = RunJson.read(rundir.manifest)
    is_extract = facts.text("recipe", "command") == "extract"
    table = rundir.record_table("extract" if is_extract else "predict")
    has_table = table.is_file()
    counts = count_records(table, facts.text("recipe", "input_type"), helpers)
    return RunFiles(
        rundir=rundir,
        facts=facts,
        has_table=has_table,
        counts=counts,
        starts=DeviceTimeline.read_all(rundir.machine),
        complaints=read_complaints(rundir.log),
        rows=counts.rows(counts.n_records, helpers),
        helpers=helpers,
    )


class Sections(NamedTuple):
    """Further sections of a page: content of the templates, and data of the script."""

    content: Mapping[str, object]
    data: Mapping[str, object]
    n_regions: Mapping[Key, int]  # per record, by file and id


NO_SECTIONS = Sections({}, {}, {})
