"""Files that are neither FASTA nor FASTQ are named, with a remedy."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pytest
from forkserver_runner import virnucpro

from virnucpro.sequences.other_formats import find_other_format, known_formats

# name -> beginnings of such files
STARTS: dict[str, tuple[bytes, ...]] = {
    "SAM": (
        b"@HD\tVN:1.6\tSO:coordinate\n",
        b"@SQ\tSN:1\tLN:9\n",
        b"@PG\tID:bwa\n",
        b"r1\t4\t*\t0\t0\t*\t*\t0\t0\tACGT\tIIII\n",
    ),
    "BAM": (b"BAM\x01\x10\0\0\0@HD\t",),
    "CRAM": (b"CRAM\x03\x01",),
    "PAF": (b"r1\t1000\t0\t990\t+\tchr1\t9000\t10\t1000\n",),
    "VCF": (b"##fileformat=VCFv4.3\n",),
    "BCF": (b"BCF\x02\x02",),
    "GFA": (b"H\tVN:Z:1.0\nS\t1\tACGT\n", b"S\t1\tACGT\tLN:i:4\n", b"# made by x\nS\t1\tACGT\n"),
    "GFF": (b"##gff-version 3\n", b"#!genome-build GRCh38\n"),
    "the index of a FASTA file": (b"chr1\t248956422\t112\t70\t71\n",),
    "an index of another file": (b"BAI\x01\0", b"CSI\x01\0"),
    "a table of BLAST": (b"# BLASTN 2.14.0+\n", b"# TBLASTX 2.14.0+\n"),
    "an HMMER profile": (b"HMMER3/f [3.3.2]\n",),
    "GenBank": (b"LOCUS       NC_001416 48502 bp DNA\n",),
    "EMBL": (b"ID   X56734; SV 1; linear;\n",),
    "ASN.1": (b"Seq-entry ::= set {\n",),
    "PIR (NBRF)": (b">P1;CRAB_ANAPL\n",),
    "PDB": (b"HEADER    VIRAL PROTEIN\n", b"ATOM      1  N   MET A   1\n"),
    "mmCIF": (b"data_6VXX\n#\n",),
    "NEXUS": (b"#NEXUS\nBEGIN DATA;\n",),
    "a Newick tree": (b"((a:0.1,b:0.2):0.3,c);\n",),
    "Clustal": (b"CLUSTAL W (1.83) multiple sequence alignment\n",),
    "Stockholm": (b"# STOCKHOLM 1.0\n",),
    "PHYLIP": (b" 5 42\nTurkey    AAGCTNGGGC\n",),
    "an SRA archive": (b"NCBI.sra\0",),
    "POD5": (b"\x8bPOD\r\n\x1a\n",),
    "HDF5": (b"\x89HDF\r\n\x1a\n\0",),
    "an ABI trace": (b"ABIF\0",),
    "SFF": (b".sff\0",),
    "2bit": (b"\x43\x27\x41\x1a\0\0", b"\x1a\x41\x27\x43\0\0"),
    "NAF": (b"\x01\xf9\xec\x01",),
    "Parquet": (b"PAR1\x15\0",),
    "a zip archive": (b"PK\x03\x04\x14\0",),
    "a 7z archive": (b"7z\xbc\xaf\x27\x1c\0",),
    "a RAR archive": (b"Rar!\x1a\x07\0",),
    "a file of compress (.Z)": (b"\x1f\x9d\x90>\x84",),
    "an lz4 file": (b"\x04\x22\x4d\x18d@",),
    "an lzip file": (b"LZIP\x01",),
    "an lzma file": (b"\x5d\0\0\x80\0",),
    "compressed twice": (gzip.compress(b">a\nACGT\n", mtime=0), b"\x28\xb5\x2f\xfd\0"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",),
    "a git-annex pointer": (b"/annex/objects/MD5E-s1--0.fa\n",),
    "an HTML page": (
        b"<!DOCTYPE html>\n<html>",
        b"\n  <HTML><HEAD><TITLE>404",
        b"<!-- made -->\n<!doctype HTML>",
    ),
    "XML": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code>', b"<TSeqSet>"),
    "JSON": (b'{"error": "not found"}', b"[\n  {"),
    "PDF": (b"%PDF-1.7\n",),
    "RTF": (rb"{\rtf1\ansi >contig1",),
    "a document of Office": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",),
    "encrypted": (b"-----BEGIN PGP MESSAGE-----\n", b"crypt4gh\x01", b"Salted__\0"),
    "a resource fork of macOS": (b"\0\x05\x16\x07\0\x02",),
    "UTF-32 text": (">a\n".encode("utf-32"), b"\0\0\xfe\xff\0\0\0>"),
    "UTF-16 text": (">a\n".encode("utf-16"), b"\xfe\xff\0>"),
}
PAIRS = [(name, start) for name, starts in STARTS.items() for start in starts]


def test_each_format_has_an_example() -> None:
    assert {other.name for other, _ in known_formats()} == set(STARTS)


@pytest.mark.parametrize(("name", "start"), PAIRS)
def test_format_is_named_by_its_start(name: str, start: bytes) -> None:
    other = find_other_format(start)
    assert other is not None
    assert other.name == name
    assert other.remedy
    assert find_other_format(b"\xef\xbb\xbf\r\n" + start) is not None


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\n\n",
        b">a\nACGT\n",
        b">S\t1\nACGT\n",
        b">(a)\nACGT\n",
        b">P1_contig\nACGT\n",
        b">r1\t4\t*\t0\t0\t*\t\nACGT\n",
        b"@r1\t4\t*\t0\t0\t*\t\nACGT\n+\nIIII\n",
        b"@RG\nACGT\n+\nIIII\n",
        b"@SQ_1\nACGT\n+\nIIII\n",
    ],
)
def test_fasta_and_fastq_are_no_other_format(start: bytes) -> None:
    assert find_other_format(start) is None


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("graph.gfa", b"H\tVN:Z:1.0\nS\tu1\tACGT\n", "GFA"),
        ("graph.gfa.gz", gzip.compress(b"S\tu1\tACGT\n", mtime=0), "GFA"),
        ("reads.bam", gzip.compress(b"BAM\x01\0\0\0\0\0\0\0\0", mtime=0), "BAM"),
        ("old.fa.Z", b"\x1f\x9d\x90\x3e\xc2\x14", "a file of compress (.Z)"),
        ("contigs.fa", b"<html><body>404 Not Found</body></html>", "an HTML page"),
        (
            "genomes.fa.gz",
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer",
        ),
    ],
)
def test_predict_names_another_format(tmp_path, file: str, content: bytes, name: str) -> None:
    (tmp_path / file).write_bytes(content)
    done = virnucpro("predict", "--input", tmp_path / file, "--output-dir", tmp_path / "run")
    assert done.returncode == 65
    assert f"{file}: this is {name}, not FASTA or FASTQ" in done.stderr.replace("\n", " ")
    assert "hint" in done.stderr


@pytest.mark.skipif(not shutil.which("awk"), reason="needs awk")
def test_gfa_remedy_makes_fasta(tmp_path) -> None:
    (tmp_path / "graph.gfa").write_text("H\tVN:Z:1.0\nS\tu1\tACGT\tLN:i:4\nL\tu1\t+\tu1\t+\t0M\n")
    other = find_other_format(b"S\tu1\tACGT\n")
    assert other is not None
    command = other.remedy.split("`")[1]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)  # noqa: S602 - our own text
    assert (tmp_path / "out.fa").read_text() == ">u1\nACGT\n"
