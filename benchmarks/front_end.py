"""How fast the front end is on one core: from FASTA to shards of ORFs, in Mbp/s of input.

Measured is what a run does with nucleotides before the language model: ``read_fasta``,
``chunk_record``, ``translate_six_frames``, ``SeenProteins`` and ``ShardWriter``, in the blocks of
``plan``; together, once more with the screening of each record that a run adds
(``find_invalid``), and stage by stage. The duplicate check and the counts of a run are left out.

Beside it stand two plain Python ways to the same ORFs, with Biopython's ``SeqIO``, a dictionary
of codons and one pass over the file. One leaves a frame at its first stop. The other translates
every frame to its end, as the original VirNucPro does; the original also writes the chunks and
reads them again, and writes the bases beside each frame. Neither way does that here, so the
ratios understate what the original costs.

All ways first have to give the same ids and proteins in the same order. Then they are timed in
one process on one core, on the whole input, in turn: one round to warm up, then the repeats.
Mbp/s and ratios come from the medians of CPU time, which other programs on the machine disturb
less; the wall clock is kept beside it, and on an idle machine they agree. Files are written to
the temporary folder and are not synced to disk. The stages are timed on lists, one stage after
the other, so the input has to fit in memory.

    python benchmarks/front_end.py [FASTA] [--chunk-size 500] [--repeats 5] [--json FILE]

Without a FASTA two inputs are made from a seed: contigs, and 150-base reads drawn from them.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, pairwise, product, zip_longest
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import NamedTuple

import Bio
import numpy as np
from Bio import SeqIO

import virnucpro
from virnucpro.config import RESIDUES_PER_SHARD
from virnucpro.fasta import find_invalid, read_fasta, write_record
from virnucpro.files import open_binary, sha256
from virnucpro.plan import _BLOCK_LETTERS, _blocks
from virnucpro.records import FastaRecord, Shard
from virnucpro.repeats import SeenProteins
from virnucpro.shards import ShardWriter, read_shard
from virnucpro.translate import chunk_record, translate_six_frames

SEED = 1
TOTAL_BASES = 5_000_000
CONTIG_BASES = (1_000, 50_000)  # shortest and longest, drawn evenly on a log scale
GENE_CODONS = (200, 800)
SPACER_BASES = (200, 800)
READ_BASES, N_READS = 150, 10_000

# the standard genetic code, codons in the order of product("TCAG", repeat=3)
GENETIC_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODONS = dict(zip(map("".join, product("TCAG", repeat=3)), GENETIC_CODE, strict=True))
SENSE = [codon for codon, letter in CODONS.items() if letter != "*"]
STOPS = [codon for codon, letter in CODONS.items() if letter == "*"]
COMPLEMENT = str.maketrans("ACGT", "TGCA")

PRODUCT = "virnucpro"
SCREENED = "virnucpro, with screening"
STAGES = ("read", "screen", "chunk", "translate", "repeats", "write")

Way = Callable[[Path], object]  # writes the ORFs of one input into a folder


@dataclass(frozen=True, slots=True)
class Case:
    """One input and what comes out of it."""

    name: str
    description: str
    sha256: str
    n_records: int
    n_bases: int
    n_chunks: int
    n_open_chunks: int  # with at least one open frame
    n_orfs: int
    n_residues: int
    n_shards: int

    @property
    def open_share(self) -> float:
        return self.n_open_chunks / max(self.n_chunks, 1)


class Seconds(NamedTuple):
    """What one repeat took."""

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(process_time(), perf_counter())

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.cpu - start.cpu, self.wall - start.wall)


@dataclass(frozen=True, slots=True)
class Result:
    """The seconds of every repeat, for each way and each stage."""

    case: Case
    repeats: dict[str, list[Seconds]]

    def median(self, name: str) -> Seconds:
        cpu, wall = map(median, zip(*self.repeats[name], strict=True))
        return Seconds(cpu, wall)

    def mbp_per_second(self, name: str) -> float:
        return self.case.n_bases / 1e6 / self.median(name).cpu

    def ratio(self, name: str) -> float:
        """How many times faster ours is."""
        return self.median(name).cpu / self.median(PRODUCT).cpu


# -- the inputs


def make_contigs(random: Random) -> list[FastaRecord]:
    """Contigs of genes on either strand between random spacers; a few N, some in lower case."""
    contigs: list[FastaRecord] = []
    n_bases = 0
    while n_bases < TOTAL_BASES:
        shortest, longest = map(math.log, CONTIG_BASES)
        length = round(math.exp(random.uniform(shortest, longest)))
        name = f"contig_{len(contigs) + 1}"
        contigs.append(FastaRecord(name, name, _make_contig(random, length)))
        n_bases += length
    return contigs


def _make_contig(random: Random, length: int) -> str:
    parts: list[str] = []
    n_bases = 0
    while n_bases < length:
        letters = "N" if random.random() < 0.01 else "ACGT"
        spacer = "".join(random.choices(letters, k=random.randint(*SPACER_BASES)))
        codons = random.choices(SENSE, k=random.randint(*GENE_CODONS))
        gene = "".join([*codons, random.choice(STOPS)])
        if random.random() < 0.5:
            gene = gene.translate(COMPLEMENT)[::-1]
        parts += (spacer, gene)
        n_bases += len(spacer) + len(gene)
    contig = "".join(parts)[:length]
    return contig.lower() if random.random() < 0.1 else contig


def make_reads(random: Random, contigs: list[FastaRecord]) -> list[FastaRecord]:
    """Reads from either strand, without errors; long contigs give more of them."""
    sources = random.choices(contigs, weights=[len(c.sequence) for c in contigs], k=N_READS)
    reads = []
    for number, contig in enumerate(sources, start=1):
        start = random.randint(0, len(contig.sequence) - READ_BASES)
        read = contig.sequence[start : start + READ_BASES].upper()
        if random.random() < 0.5:
            read = read.translate(COMPLEMENT)[::-1]
        reads.append(FastaRecord(f"read_{number}", f"read_{number}", read))
    return reads


def write_inputs(folder: Path) -> dict[Path, str]:
    """Write the contigs and the reads, and say what they are; the seed decides every byte."""
    random = Random(SEED)
    contigs = make_contigs(random)
    reads = make_reads(random, contigs)
    shortest, longest = CONTIG_BASES
    inputs = {
        folder / "contigs.fa": (contigs, f"synthetic contigs of {shortest} to {longest} bases"),
        folder / "reads_150.fa": (reads, f"{READ_BASES}-base reads drawn from contigs.fa"),
    }
    for path, (records, _) in inputs.items():
        with path.open("w", encoding="utf-8") as out:
            for record in records:
                write_record(out, record.header, record.sequence)
    return {path: description for path, (_, description) in inputs.items()}


# -- the ways


def run_product(path: Path, size: int, folder: Path, *, screened: bool = False) -> list[Shard]:
    """Write the shards as a run does; ``screened`` looks for strange letters first."""
    writer = ShardWriter(folder, RESIDUES_PER_SHARD)
    records = read_fasta(path)
    if screened:
        records = (record for record in records if not find_invalid(record, "nucleotide"))
    chunks = chain.from_iterable(chunk_record(record, size) for record in records)
    seen = SeenProteins()
    for block in _blocks(chunks):
        for orf in seen.mark(translate_six_frames(block)):
            writer.add(orf)
    writer.flush()
    return writer.shards


def run_plain(path: Path, size: int, translate: Callable[[str, int], str], folder: Path) -> None:
    """Write the same ORFs to one FASTA file, with one record, chunk and codon at a time."""
    with (
        io.TextIOWrapper(open_binary(path), encoding="utf-8") as handle,
        (folder / "proteins.faa").open("w", encoding="utf-8") as out,
    ):
        for record in SeqIO.parse(handle, "fasta"):  # type: ignore[no-untyped-call]
            for chunk_id, chunk in plain_chunks(record.id, str(record.seq), size):
                forward = chunk.upper()
                reverse = forward.translate(COMPLEMENT)[::-1]
                for strand, bases in (("F", forward), ("R", reverse)):
                    for offset in range(3):
                        protein = translate(bases, offset)
                        if protein:
                            out.write(f">{chunk_id}{strand}{offset + 1}\n{protein}\n")


def plain_chunks(record_id: str, sequence: str, size: int) -> Iterator[tuple[str, str]]:
    """Id and bases of each chunk: the first k boundaries overlap by q + 1 bases, others by q."""
    n_chunks = -(-len(sequence) // size)
    if not n_chunks:
        return
    surplus = n_chunks * size - len(sequence)
    q = surplus // n_chunks
    k = surplus - q * (n_chunks - 1)
    start = 0
    for i in range(n_chunks):
        yield f"{record_id}_chunk_{i + 1}", sequence[start : start + size]
        start += size - (q + 1 if i < k else q)


def translate_until_stop(bases: str, offset: int) -> str:
    """The protein of a frame; empty as soon as a stop is met."""
    letters: list[str] = []
    for i in range(offset, len(bases) - 2, 3):
        letter = CODONS.get(bases[i : i + 3], "")
        if letter == "*":
            return ""
        letters.append(letter)
    return "".join(letters)


def translate_whole(bases: str, offset: int) -> str:
    """The same, but the whole frame is translated before a stop is looked for."""
    triplets = (bases[i : i + 3] for i in range(offset, len(bases) - 2, 3))
    protein = "".join([CODONS.get(triplet, "") for triplet in triplets])
    return "" if "*" in protein else protein


PLAIN_WAYS = {
    "plain Python, left at a stop": translate_until_stop,
    "plain Python, to the end": translate_whole,
}


# -- the measurement


def check_ways(path: Path, description: str, size: int) -> Case:
    """Count what comes out of an input, after all ways gave the same ids and proteins.

    Raises:
        SystemExit: they did not.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        shards = run_product(path, size, folder)
        orfs = list(chain.from_iterable(map(read_shard, shards)))
        ours = [(orf.id, orf.protein) for orf in orfs]
        for way, translate in PLAIN_WAYS.items():
            run_plain(path, size, translate, folder)
            lines = (folder / "proteins.faa").read_text(encoding="utf-8").split("\n")
            ids = [header[1:] for header in lines[:-1:2]]
            _refuse_difference(ours, list(zip(ids, lines[1::2], strict=True)), path, way)
    lengths = [len(record.sequence) for record in read_fasta(path)]
    return Case(
        name=path.name,
        description=description,
        sha256=sha256(path),
        n_records=len(lengths),
        n_bases=sum(lengths),
        n_chunks=sum(-(-length // size) for length in lengths),
        n_open_chunks=len({orf.chunk_id for orf in orfs}),
        n_orfs=len(orfs),
        n_residues=sum(len(orf.protein) for orf in orfs),
        n_shards=len(shards),
    )


def _refuse_difference(
    ours: list[tuple[str, str]], plain: list[tuple[str, str]], path: Path, way: str
) -> None:
    if ours == plain:
        return
    pairs = enumerate(zip_longest(ours, plain))
    at, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    raise SystemExit(
        f"{path.name}: {PRODUCT} gives {len(ours)} ORFs, {way} {len(plain)}; "
        f"they differ first at ORF {at + 1}:\n  {one}\n  {other}"
    )


def time_way(way: Way) -> Seconds:
    """Run it once, into a new folder."""
    with TemporaryDirectory() as name:
        gc.collect()
        start = Seconds.now()
        way(Path(name))
        return Seconds.now().since(start)


def time_stages(path: Path, size: int) -> dict[str, Seconds]:
    """Run each stage once, one after the other on lists."""
    with TemporaryDirectory() as name:
        writer = ShardWriter(Path(name), RESIDUES_PER_SHARD)
        gc.collect()
        marks = [Seconds.now()]
        records = list(read_fasta(path))
        marks.append(Seconds.now())
        for record in records:
            find_invalid(record, "nucleotide")
        marks.append(Seconds.now())
        chunks = [chunk for record in records for chunk in chunk_record(record, size)]
        marks.append(Seconds.now())
        orfs = [translate_six_frames(block) for block in _blocks(chunks)]
        marks.append(Seconds.now())
        seen = SeenProteins()
        orfs = [seen.mark(block) for block in orfs]
        marks.append(Seconds.now())
        for orf in chain.from_iterable(orfs):
            writer.add(orf)
        writer.flush()
        marks.append(Seconds.now())
    seconds = (end.since(start) for start, end in pairwise(marks))
    return dict(zip(STAGES, seconds, strict=True))


def measure(path: Path, description: str, size: int, repeats: int) -> Result:
    """Time all ways and the stages in turn; the first round is thrown away."""
    case = check_ways(path, description, size)
    ways: dict[str, Way] = {
        PRODUCT: partial(run_product, path, size),
        SCREENED: partial(run_product, path, size, screened=True),
        **{name: partial(run_plain, path, size, way) for name, way in PLAIN_WAYS.items()},
    }
    seconds: dict[str, list[Seconds]] = {name: [] for name in (*ways, *STAGES)}
    for i in range(repeats + 1):
        latest = {name: time_way(way) for name, way in ways.items()} | time_stages(path, size)
        if i:
            for name, value in latest.items():
                seconds[name].append(value)
    return Result(case, seconds)


# -- the report


def pin_to_one_core() -> int | None:
    """Keep this process on one core, where the system can (Linux); returns which."""
    if sys.platform != "linux":
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def describe_machine() -> dict[str, object]:
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), cpu)
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "n_cores": os.cpu_count(),
        "pinned_to_core": pin_to_one_core(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "biopython": Bio.__version__,
    }


def format_table(result: Result) -> str:
    case = result.case
    lines = [
        f"{case.name}: {case.n_records} records, {case.n_bases / 1e6:.2f} Mbp, "
        f"{case.n_chunks} chunks, {case.open_share:.0%} of them with an open frame, "
        f"{case.n_orfs} ORFs of {case.n_residues} residues in all",
        f"  {'':32}{'CPU s':>9}{'wall s':>9}{'Mbp/s':>9}{'ours is':>12}",
    ]
    for name in result.repeats:
        label = f"  {name}" if name in STAGES else name
        cpu, wall = result.median(name)
        ratio = f"{result.ratio(name):.1f} x" if name in PLAIN_WAYS else ""
        speed = result.mbp_per_second(name)
        lines.append(f"  {label:32}{cpu:>9.4f}{wall:>9.4f}{speed:>9.1f}{ratio:>12}".rstrip())
    return "\n".join(lines)


def to_json(result: Result) -> dict[str, object]:
    """Medians, Mbp/s and ratios by way and stage, and the seconds of every repeat."""
    return {
        **asdict(result.case),
        "open_chunk_share": round(result.case.open_share, 4),
        "ratios": {name: round(result.ratio(name), 2) for name in PLAIN_WAYS},
        "timings": {name: _timing(result, name) for name in result.repeats},
    }


def _timing(result: Result, name: str) -> dict[str, object]:
    median_of = result.median(name)
    cpu, wall = zip(*result.repeats[name], strict=True)
    return {
        "mbp_per_second": round(result.mbp_per_second(name), 2),
        "median_cpu_seconds": round(median_of.cpu, 6),
        "median_wall_seconds": round(median_of.wall, 6),
        "cpu_seconds": [round(value, 6) for value in cpu],
        "wall_seconds": [round(value, 6) for value in wall],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mbp/s of the front end on one core.")
    parser.add_argument(
        "fasta", nargs="?", type=Path, help="nucleotides; default: made from a seed"
    )
    parser.add_argument("--chunk-size", type=int, default=500, help="bases (default: 500)")
    parser.add_argument("--repeats", type=int, default=5, help="after a warm-up (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    arguments = parser.parse_args()
    if arguments.chunk_size < 1 or arguments.repeats < 1:
        parser.error("--chunk-size and --repeats must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(f"virnucpro {virnucpro.__version__}, {machine['cpu']}, one core")
    results = []
    with TemporaryDirectory() as name:
        given = arguments.fasta
        inputs = {given: "given"} if given else write_inputs(Path(name))
        for path, description in inputs.items():
            results.append(measure(path, description, arguments.chunk_size, arguments.repeats))
            print(f"\n{format_table(results[-1])}", flush=True)
    if arguments.json:
        report = {
            "benchmark": "front_end",
            "virnucpro": virnucpro.__version__,
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine,
            "seed": None if arguments.fasta else SEED,
            "chunk_size": arguments.chunk_size,
            "block_bases": _BLOCK_LETTERS,
            "residues_per_shard": RESIDUES_PER_SHARD,
            "warm_ups": 1,
            "repeats": arguments.repeats,
            "inputs": [to_json(result) for result in results],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
