"""Measure the front end alone, from FASTA to shards of ORFs, on one core or with helpers.

Figures are Mbp of input per second, by the wall clock and by the CPU time of the parent. Ours is
``Plan.plan_slices`` as in a run: read, screen, chunk, translate, write shards, refuse duplicates.
It is compared with the way of the original VirNucPro, in plain Python with Biopython's reader: one
record, chunk and codon at a time. The original's second pass over the chunks, and the bases that it
writes with each frame, are left out, so the ratio understates its cost.

Before the measurement, both must give the same ids and proteins in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from Bio import SeqIO

from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Selection
from virnucpro.store.shard_files import read_shard

CHUNK_SIZE = 500
READ_BASES = 150
_CONTIG_BASES = (1_000, 50_000)  # shortest and longest, drawn evenly on a log scale
_GENE_CODONS = (200, 800)
_SPACER_BASES = (200, 800)
# the standard genetic code, codons in the order of product("TCAG", repeat=3)
_GENETIC_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
_CODONS = dict(zip(map("".join, product("TCAG", repeat=3)), _GENETIC_CODE, strict=True))
_SENSE = [codon for codon, letter in _CODONS.items() if letter != "*"]
_STOPS = [codon for codon, letter in _CODONS.items() if letter == "*"]
_COMPLEMENT = str.maketrans("ACGT", "TGCA")

Frames = list[tuple[str, str]]  # id, protein
Way = Callable[[Path, Path], Callable[[], Frames]]  # FASTA, new folder -> reader of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndRow:
    input: str
    way: str
    n_records: int
    n_bases: int
    n_orfs: int | None = None
    mbp_per_second: float | None = None
    mbp_per_cpu_second: float | None = None  # of the parent
    ratio: float | None = None  # to the first row of the input
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    reason: str = ""


def measure_front_end(
    n_bases: int, repeats: int, seed: int, n_helpers: int
) -> Iterator[FrontEndRow]:
    """Yield rows for contigs and for reads: the original's way, and ours without and with helpers.

    Helpers are not used for inputs of less than a million bases.
    """
    random = Random(seed)
    ways = dict(WAYS)
    if n_helpers:
        ways[f"virnucpro, {n_helpers} helpers"] = partial(run_ours, n_helpers=n_helpers)
    contigs = make_contigs(random, n_bases)
    reads = make_reads(random, contigs, n_bases // 4)
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        for name, sequences in (("contigs", contigs), (f"reads of {READ_BASES}", reads)):
            fasta = Path(folder) / "input.fa"
            with fasta.open("w", encoding="utf-8") as out:
                for number, sequence in enumerate(sequences, start=1):
                    write_record(out, f"record_{number}", sequence)
            rows = {
                way: FrontEndRow(
                    input=name,
                    way=way,
                    n_records=len(sequences),
                    n_bases=sum(map(len, sequences)),
                )
                for way in ways
            }
            yield from _measured(rows, ways, fasta, repeats)


def _measured(
    rows: dict[str, FrontEndRow], ways: Mapping[str, Way], fasta: Path, repeats: int
) -> Iterator[FrontEndRow]:
    try:
        n_orfs = check_agreement(ways.values(), fasta)
    except RuntimeError as error:
        yield from (replace(row, reason=str(error)) for row in rows.values())
        return
    times = _time_in_turn(ways, fasta, repeats)
    first = median(wall for wall, _ in next(iter(times.values())))
    for way, taken in times.items():
        wall, cpu = zip(*taken, strict=True)
        yield replace(
            rows[way],
            n_orfs=n_orfs,
            mbp_per_second=rows[way].n_bases / 1e6 / median(wall),
            mbp_per_cpu_second=rows[way].n_bases / 1e6 / median(cpu),
            ratio=first / median(wall),
            seconds=wall,
            cpu_seconds=cpu,
        )


def make_contigs(random: Random, n_bases: int) -> list[str]:
    """Make contigs: genes on either strand and random spacers; some N, some lower case."""
    contigs: list[str] = []
    while sum(map(len, contigs)) < n_bases:
        length = round(math.exp(random.uniform(*map(math.log, _CONTIG_BASES))))
        parts: list[str] = []
        while sum(map(len, parts)) < length:
            letters = "N" if random.random() < 0.01 else "ACGT"
            parts.append("".join(random.choices(letters, k=random.randint(*_SPACER_BASES))))
            codons = random.choices(_SENSE, k=random.randint(*_GENE_CODONS))
            gene = "".join([*codons, random.choice(_STOPS)])
            parts.append(gene if random.random() < 0.5 else reverse_complement(gene))
        contig = "".join(parts)[:length]
        contigs.append(contig.lower() if random.random() < 0.1 else contig)
    return contigs


def make_reads(random: Random, contigs: list[str], n_bases: int) -> list[str]:
    """Draw error-free reads from both strands, in proportion to the lengths of the contigs."""
    n_reads = max(1, n_bases // READ_BASES)
    reads = []
    for contig in random.choices(contigs, weights=list(map(len, contigs)), k=n_reads):
        start = random.randint(0, len(contig) - READ_BASES)
        read = contig[start : start + READ_BASES].upper()
        reads.append(read if random.random() < 0.5 else reverse_complement(read))
    return reads


def reverse_complement(bases: str) -> str:
    return bases.translate(_COMPLEMENT)[::-1]


_NO_ENCODER = EncoderSpec(
    model="", sha256="", layer=1, pooling="mean", precision="fp32", dim=0
)  # frames are cut only if there is an encoder


def run_ours(fasta: Path, folder: Path, n_helpers: int = 0) -> Callable[[], Frames]:
    recipe = Recipe(
        command="extract",
        input_type="nucleotide",
        chunk_size=CHUNK_SIZE,
        min_length=0,
        encoders=(_NO_ENCODER,),
    )
    manifest = Manifest(
        recipe, tuple(InputScan(is_strict=True).hash([InputFile(str(fasta))], lambda _: None))
    )
    rundir = open_run_dir(folder)
    with rundir.planning():
        with HelperPool(n_helpers) as pool:
            plan = Plan.cut(rundir, manifest, keep_intermediate=False).plan_slices(
                Selection(), lambda _: None, pool
            )
        plan.write_listing()
        rundir.adopt_plan()
    orfs = chain.from_iterable(map(read_shard, plan.shards))
    return lambda: [(orf.id, orf.protein) for orf in orfs]


def run_original(fasta: Path, folder: Path) -> Callable[[], Frames]:
    path = folder / "proteins.faa"
    with fasta.open(encoding="utf-8") as handle, path.open("w", encoding="utf-8") as out:
        for record in SeqIO.parse(handle, "fasta"):  # type: ignore[no-untyped-call]
            for chunk_id, chunk in _plain_chunks(record.id, str(record.seq)):
                forward = chunk.upper()
                for strand, bases in (("F", forward), ("R", reverse_complement(forward))):
                    for offset in range(3):
                        protein = _translate(bases, offset)
                        if protein:
                            out.write(f">{chunk_id}{strand}{offset + 1}\n{protein}\n")

    def frames() -> Frames:
        lines = path.read_text(encoding="utf-8").split("\n")
        return list(zip((line[1:] for line in lines[:-1:2]), lines[1::2], strict=True))

    return frames


def _plain_chunks(record_id: str, sequence: str) -> Iterator[tuple[str, str]]:
    """Yield the chunks of a record. The first k neighbours overlap by q + 1 bases, others by q."""
    n_chunks = -(-len(sequence) // CHUNK_SIZE)
    surplus = n_chunks * CHUNK_SIZE - len(sequence)
    q = surplus // n_chunks
    k = surplus - q * (n_chunks - 1)
    start = 0
    for i in range(n_chunks):
        yield f"{record_id}_chunk_{i + 1}", sequence[start : start + CHUNK_SIZE]
        start += CHUNK_SIZE - (q + 1 if i < k else q)


def _translate(bases: str, offset: int) -> str:
    """Translate the whole frame, and only then look for a stop, as the original does."""
    triplets = (bases[i : i + 3] for i in range(offset, len(bases) - 2, 3))
    protein = "".join([_CODONS.get(triplet, "") for triplet in triplets])
    return "" if "*" in protein else protein


WAYS: dict[str, Way] = {"as the original, plain Python": run_original, "virnucpro": run_ours}


def check_agreement(ways: Iterable[Way], fasta: Path) -> int:
    """Check that all ways give the same ids and proteins in the same order; return their number.

    Raises:
        RuntimeError: the ways differ.
    """
    found = []
    for way in ways:
        with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
            found.append(way(fasta, Path(folder))())
    if any(other != found[0] for other in found):
        raise RuntimeError(f"the ways give {' and '.join(map(str, map(len, found)))} ORFs")
    return len(found[0])


def _time_in_turn(
    ways: Mapping[str, Way], fasta: Path, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """The wall and CPU seconds of each repeat, by way. The earlier check was the warm-up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
                run = partial(way, fasta, Path(folder))
                started = time.perf_counter()
                cpu_started = time.process_time()
                run()
                wall = time.perf_counter() - started
                cpu = time.process_time() - cpu_started
                times[name].append((wall, cpu))
    return times
