"""Find transposable elements in the labelled cells, to train and evaluate a scorer.

    python scripts/weights/scorer_elements.py manifest.tsv elements.fa > elements.tsv
    tail -n +2 elements.tsv >> manifest.tsv

Needs pyhmmer. Long stop-free stretches of eukaryotes, in six frames, are searched with one protein
of each kind of element, and then with a profile of the hits. A hit with its flanking bases becomes
a record of its own, in the group of the sequence it lies in, and so in the same fold and part of a
split.

For the scorer of this release, a second manifest named two more chromosomes, and only elements were
kept of these: *Arabidopsis thaliana* 5 (as packed with Mikado 2.3.4, "genus Arabidopsis", plants)
and *Caenorhabditis elegans* I (with cogent3 2026.9.10, "genus Caenorhabditis", animals). 614
elements were found; without these chromosomes 373.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyhmmer
from Bio.Seq import Seq
from pyhmmer.easel import Alphabet, DigitalSequenceBlock, TextSequence

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.fasta import write_record
from virnucpro.training.labelled_data import LabelledRecord, read_data_manifest, read_records

HOST_KINGDOMS = ("animals", "fungi", "plants", "protists", "transcripts")
KINGDOM = "transposable elements"
COLUMNS = ("path", "id", "label", "group", "weight", "kingdom")
MIN_STRETCH_RESIDUES = 70
MAX_ROUNDS = 4
MAX_E_VALUE = 1e-5  # among all stretches
FLANK_BASES = 1500  # on both sides
MAX_ELEMENT_BASES = 8000  # of an element that near stretches are merged into
# Reverse transcriptases of retroelements and transposases of DNA transposons
SEEDS = {
    "Copia": (
        "WKVKQLDVNNAFLHGDLEEEVYMKQPPGFVDPKHPDHVCKLKKSLYGLKQAPRAWYEKLSSFLLSNGFTRSKSDHSLFIYHTGDSLIILL"
        "VYVDDILITGNN"
    ),
    "Gypsy": (
        "PYRMSPAELEELKKQLQELLDKGFIRPSSSPWGAPVLFVKKKDGSLRMCIDYRALNKVTIKNRYPLPRIDDLFDQLQGAKVFSKIDLRSG"
        "YHQIRIKEEDIPKTAFRTRYGHYEFLVMPFGLTNAPATFMDLMNRVFRPYLDKFVIVFIDDILIYSKSEEEHEEHLRLVLQTLREHKLYA"
        "KLSKCEFWLEEVEFLGHVISKDGISVDPSKVEAI"
    ),
    "ERV": (
        "WAETGGMGLAVRQAPLIIPLKATSTPVSIKQYPMSQEARLGIKPHIQRLLDQGILVPCQSPWNTPLLPVKKPGTNDYRPVQDLREVNKRV"
        "EDIHPTVPNPYNLLSGLPPSHQWYTVLDLKDAFFCLRLHPTSQPLFAFEWRDPEMGISGQLTWTRLPQGFKNSPTLFDEALHRDLADFRI"
        "QHPDLILLQYVDDLLLAATSELDCQQGTRALLQTLGNLGYRASAKKAQICQKQVKYLGYLLKEGQRWLTEARKETVMGQPTPKTPRQLRE"
        "FLGTAGFCRLFIPGFAEMAAPLYPLTKTGTLF"
    ),
    "LINE": (
        "HNRTKDKNHMIISIDAEKAFDKIQQPFMLKTLNKLGIDGTYFKIIRAIYDKPTANIILNGQKLEAFPLKTGTRQGCPLSPLLFNIVLEVL"
        "ARAIRQEKEIKGIQLGKEEVKLSLFADDMIVYLENPIVSAQNLLKLISNFSKVSGYKINVQKSQAFLYTNNRQTESQIMGELPFTIASKR"
        "IKYLGIQLTRDVKDLFKENYKPLLKEIKEDTNKWKNIPCSWVGRINIVKMAILPKVIYRFNAIPIKLPMTFFTELEKTTLKFIWNQKRAR"
        "IAKSILSQKNKAGGITLPDFKLYYKATVTKTAWYWYQ"
    ),
    "mariner": (
        "TCERWFQRFKSGDFDVDDKEHGKPPKRYEDAELQALLDEDDAQTQKQLAEQLEVSQQAVSNRLREMGKIQKVGRWVPHELNERQMERRKN"
        "TCEILLSRYKRKSFLHRIVTGDEKWIFFVSPKRKKSYVDPGQPATSTARPNRFGKKTMLCVWWDQSGVIYYELLKRGETVNTARYQQQLI"
        "NLNRALQRKRPEYQKRQHRVIFLHDNAPSHTARAVRDTLETLNWEVLPHAAYSPDLAPSDYHLFASMGHALAEQRF"
    ),
    "Tc1": (
        "MGKSKEISQDLRKKIVDLHKSGSSLGAISKRLKVPRSSVQTIVRKYKHHGTTQPSYRSGRRRVLSPRDERTLVRKVQINPRTTAKDLVKM"
        "LEETGTKVSISTVKRVLYRHNLKGRSARKKPLLQNRHKKARLRFATAHGDKDRTFWRNVLWSDETKIELFGHNDHRYVWRKKGEACKPKN"
        "TIPTVKHGGGSIMLWGCFAAGGTGALHKIDGIMRKENYVDILKQHLKTSVRKLKLGRKWVFQMDNDPKHTSKVVAKWLKDNKVKVLEWPS"
        "QSPDLNPIENLWAELKKRVRARRP"
    ),
    "piggyBac": (
        "EDEIYAFFGILVMTAVRKDNHMSTDDLFDRSLSMVYVSVMSRDRFDFLIRCLRMDDKSIRPTLRENDVFTPVRKIWDLFIHQCIQNYTPG"
        "AHLTIDEQLLGFRGRCPFRMYIPNKPSKYGIKILMMCDSGTKYMINGMPYLGRGTQTNGVPLGEYYVKELSKPVHGSCRNITCDNWFTSI"
        "PLAKNLLQEPYKLTIVGTVRSNKREIPEVLKNSRSRPVGTSMFCFDGPLTLVSYKPKPAKMVYLLSSCDEDASINESTGKPQMVMYYNQT"
        "KGGVDTLDQMCSVMTCSRKTNRWPMALLYGMINIACINSFIIY"
    ),
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stop-free stretch: the index of its record, and its first base and end there."""

    record: int
    start: int
    end: int


Sequences = list[tuple[LabelledRecord, str]]


def stretches(sequence: str, record: int) -> Iterator[tuple[Stretch, str]]:
    """Yield the long stop-free stretches of six frames, and their residues."""
    n_bases = len(sequence)
    for is_reverse in (False, True):
        strand = reverse_complement(sequence) if is_reverse else sequence
        for frame in range(3):
            start = frame
            in_frame = strand[frame : frame + (n_bases - frame) // 3 * 3]
            protein = str(Seq(in_frame).translate())  # type: ignore[no-untyped-call]
            for residues in protein.split("*"):
                end = start + 3 * len(residues)
                if len(residues) >= MIN_STRETCH_RESIDUES:
                    low, high = (n_bases - end, n_bases - start) if is_reverse else (start, end)
                    yield Stretch(record, low, high), residues
                start = end + 3


def search_elements(sequences: Sequences) -> dict[Stretch, str]:
    """Return the stretches that resemble an element, and the most similar kind of each."""
    alphabet = Alphabet.amino()
    searched: list[Stretch] = []
    targets = []
    for record, (_, sequence) in enumerate(sequences):
        for stretch, residues in stretches(sequence, record):
            name = str(len(searched)).encode()
            targets.append(TextSequence(name=name, sequence=residues).digitize(alphabet))
            searched.append(stretch)
    block = DigitalSequenceBlock(alphabet, targets)
    best: dict[Stretch, tuple[float, str]] = {}
    for kind, residues in SEEDS.items():
        query = TextSequence(name=kind.encode(), sequence=residues).digitize(alphabet)
        pipeline = pyhmmer.plan7.Pipeline(alphabet, incE=MAX_E_VALUE)
        rounds = pipeline.iterate_seq(query, block)
        for _ in range(MAX_ROUNDS):
            result = next(rounds)
            if result.converged:
                break
        for hit in result.hits.included:
            stretch = searched[int(hit.name)]
            best[stretch] = max(best.get(stretch, (0.0, "")), (hit.score, kind))
    return {stretch: kind for stretch, (_, kind) in best.items()}


def merge_into_elements(
    kind_of: dict[Stretch, str], sequences: Sequences
) -> Iterator[tuple[Stretch, str]]:
    """Yield elements: near stretches with their flanks, unless they are too long together.

    Elements stay below 10,000 bases, because there are few other contigs of that length. So
    neighbouring elements may share the bases between them.
    """
    clusters: list[list[Stretch]] = []
    for stretch in sorted(kind_of, key=lambda stretch: (stretch.record, stretch.start)):
        if not clusters or not is_same_element(stretch, clusters[-1]):
            clusters.append([])
        clusters[-1].append(stretch)
    for members in clusters:
        record = members[0].record
        start = max(0, members[0].start - FLANK_BASES)
        end = min(len(sequences[record][1]), max(member.end for member in members) + FLANK_BASES)
        kinds = [kind_of[member] for member in members]
        yield Stretch(record, start, end), max(kinds, key=kinds.count)


def is_same_element(stretch: Stretch, members: list[Stretch]) -> bool:
    """Return whether a stretch is near these, and they are not too long as one element."""
    is_near = (
        stretch.record == members[0].record and stretch.start - members[-1].end < 2 * FLANK_BASES
    )
    return is_near and stretch.end - members[0].start < MAX_ELEMENT_BASES - 2 * FLANK_BASES


def main(manifest: Path, fasta: Path) -> None:
    sequences = [
        (labelled, record.sequence.upper())
        for labelled, record in read_records(read_data_manifest(manifest))
        if labelled.kingdom in HOST_KINGDOMS
    ]
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    with fasta.open("w", encoding="utf-8") as out:
        for element, kind in merge_into_elements(search_elements(sequences), sequences):
            labelled, sequence = sequences[element.record]
            name = f"{labelled.id}:{element.start}-{element.end}"
            write_record(out, f"{name} {kind}", sequence[element.start : element.end])
            cells = (fasta.absolute(), name, labelled.label, labelled.group, 1.0, KINGDOM)
            sys.stdout.write("\t".join(map(str, cells)) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [manifest, fasta]:
            main(Path(manifest), Path(fasta))
        case _:
            raise SystemExit(__doc__)
