"""Recognise files that are neither FASTA nor FASTQ by their first bytes, and name the remedy.

FASTA begins with ``>`` and FASTQ with ``@``, so only SAM and PIR need more bytes to be
distinguished from them. All other files that match here could not be read anyway. The match only
turns "expected '>'" into the name of the format.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class OtherFormat(NamedTuple):
    """A format that VirNucPro does not read."""

    name: str  # as in "this is NAME"
    remedy: str


def _convert(command: str) -> str:
    return f"convert it, for example with `{command}`"


def _unpack(command: str) -> str:
    return f"unpack it first: `{command}`"


# remedies that several formats share
_PLAIN_TEXT = "save the sequences as plain text in FASTA format"
_DOWNLOAD = "look at it: it may be a login page or an error message. Download the file again"
_HINT = "give the FASTA file that belongs to it"

# name, remedy, pattern of the first bytes; the first match counts
_TABLE: tuple[tuple[str, str, bytes], ...] = (
    # read alignments, variants, graphs
    ("SAM", _convert("samtools fasta reads.sam > reads.fa"), rb"@(HD\t|SQ\t|RG\tID:|PG\tID:)"),
    (
        "SAM",
        _convert("samtools fasta reads.sam > reads.fa"),
        rb"[^>@\s]\S*\t\d+\t\S+\t\d+\t\d+\t(\*|[\dMIDNSHP=X]+)\t",
    ),
    ("BAM", _convert("samtools fasta reads.bam > reads.fa"), rb"BAM\x01"),
    ("CRAM", _convert("samtools fasta reads.cram > reads.fa"), rb"CRAM[\x01-\x04]"),
    (
        "PAF",
        "give the FASTA file of the query or the target",
        rb"[^>@\s]\S*\t\d+\t\d+\t\d+\t[+-]\t",
    ),
    (
        "VCF",
        "give the reference, or make a consensus with `bcftools consensus`",
        rb"##fileformat=V",
    ),
    ("BCF", "give the reference, or make a consensus with `bcftools consensus`", rb"BCF\x02"),
    (
        "GFA",
        "write its segments as FASTA: `awk '/^S/ {print \">\" $2; print $3}' graph.gfa > out.fa`",
        rb"(#[^\n]*\n)*(H\t(VN|TS):|[SLPW]\t\S)",
    ),
    # annotation, indexes, search results
    ("GFF", _HINT, rb"##gff|#!genome-build|##sequence-region"),
    ("the index of a FASTA file", "give the FASTA file itself", rb"[^>@\s]\S*(\t\d+){4,5}\r?\n"),
    ("an index of another file", "give the FASTA file itself", rb"BAI\x01|CSI\x01|TBI\x01"),
    ("a table of BLAST", "give the FASTA file of the query or the subject", rb"# T?BLAST[NPX] "),
    ("an HMMER profile", "give the sequences, not their profile", rb"HMMER\d/"),
    # database flat files
    ("GenBank", _convert("any2fasta file.gbk > file.fa"), rb"LOCUS "),
    ("EMBL", _convert("any2fasta file.embl > file.fa"), rb"ID   "),
    ("ASN.1", "download the sequences as FASTA", rb"(Seq-entry|Bioseq-set|Seq-submit) ::="),
    (
        "PIR (NBRF)",
        "convert it, for example with `seqret pir::in.pir fasta::out.fa`; if it is FASTA, give it "
        "ids that do not begin with a PIR code such as P1;",
        rb">(P1|F1|DL|DC|RL|RC|N1|N3|XX);",
    ),
    # structures, trees, alignments
    ("PDB", "download the sequence as FASTA", rb"(HEADER {4}|REMARK +\d|CRYST1 |ATOM +\d)"),
    ("mmCIF", "download the sequence as FASTA", rb"data_\S+\s"),
    ("NEXUS", _convert("seqret nexus::in.nex fasta::out.fa"), rb"(?i)#nexus"),
    ("a Newick tree", "give the sequences, not their tree", rb"\s*\([\w('\"]"),
    ("Clustal", _convert("seqret clustal::in.aln fasta::out.fa"), rb"CLUSTAL"),
    ("Stockholm", _convert("seqret stockholm::in.sto fasta::out.fa"), rb"# STOCKHOLM"),
    ("PHYLIP", _convert("seqret phylip::in.phy fasta::out.fa"), rb"\s*\d+\s+\d+\s*\n"),
    # raw sequencer data
    ("an SRA archive", _convert("fasterq-dump reads.sra"), rb"NCBI\.sra"),
    ("POD5", "call bases first, for example with `dorado basecaller`", rb"\x8bPOD\r\n\x1a\n"),
    ("HDF5", f"call bases first if it is FAST5; otherwise {_HINT}", rb"\x89HDF\r\n\x1a\n"),
    ("an ABI trace", _convert("seqret abi::in.ab1 fasta::out.fa"), rb"ABIF"),
    ("SFF", _convert("sff2fastq reads.sff > reads.fq"), rb"\.sff"),
    # packed sequences, tables, archives
    ("2bit", "convert it: `twoBitToFa in.2bit out.fa`", rb"C'A\x1a|\x1aA'C"),
    ("NAF", "convert it: `unnaf in.naf > out.fa`", rb"\x01\xf9\xec"),
    ("Parquet", "give the FASTA file that it was made from", rb"PAR1"),
    ("a zip archive", _unpack("unzip"), rb"PK\x03\x04"),
    ("a 7z archive", _unpack("7z x"), rb"7z\xbc\xaf'\x1c"),
    ("a RAR archive", _unpack("unrar x"), rb"Rar!\x1a\x07"),
    ("a file of compress (.Z)", _unpack("gunzip in.fa.Z"), rb"\x1f\x9d"),
    ("an lz4 file", _unpack("lz4 -d in.fa.lz4"), rb"\x04\x22\x4d\x18"),
    ("an lzip file", _unpack("lzip -d in.fa.lz"), rb"LZIP"),
    ("an lzma file", _unpack("xz --format=lzma -d in.fa.lzma"), rb"\x5d\0\0"),
    (
        "compressed twice",
        "decompress it once, for example with `gunzip -c in.fa.gz > out.fa.gz`",
        rb"\x1f\x8b|BZh\d1AY|\xfd7zXZ\0|\x28\xb5\x2f\xfd",
    ),
    # pointers to files stored elsewhere
    (
        "a Git LFS pointer",
        "fetch the file: `git lfs pull`",
        rb"version https://(git-lfs\.github|hawser\.github)\.com/",
    ),
    (
        "a git-annex pointer",
        "fetch the file: `git annex get`",
        rb"/annex/objects/",
    ),
    # documents
    ("an HTML page", _DOWNLOAD, rb"(?is)\s*(<!--.*?-->\s*)*<(!doctype html|html|head|body|script)"),
    ("XML", f"{_DOWNLOAD} as FASTA", rb"\s*<[?!A-Za-z]"),
    ("JSON", f"{_DOWNLOAD} as FASTA", rb"\s*[{\[]\s*[\"{}\[\]]"),
    ("PDF", _PLAIN_TEXT, rb"%PDF-"),
    ("RTF", _PLAIN_TEXT, rb"\{\\rtf"),
    ("a document of Office", _PLAIN_TEXT, rb"\xd0\xcf\x11\xe0"),
    ("encrypted", "decrypt it first", rb"-----BEGIN PGP|crypt4gh|Salted__|age-encryption\.org"),
    ("a resource fork of macOS", "give the file without ._ in its name", rb"\0\x05\x16\x07"),
    # other text encodings
    ("UTF-32 text", "convert it: `iconv -f UTF-32 -t UTF-8 in.fa > out.fa`", rb"\xff\xfe\0\0"),
    ("UTF-32 text", "convert it: `iconv -f UTF-32 -t UTF-8 in.fa > out.fa`", rb"\0\0\xfe\xff"),
    ("UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 in.fa > out.fa`", rb"\xff\xfe|\xfe\xff"),
)


@cache
def known_formats() -> list[tuple[OtherFormat, re.Pattern[bytes]]]:
    """List the formats, each with the pattern of its first bytes."""
    return [(OtherFormat(name, remedy), re.compile(pattern)) for name, remedy, pattern in _TABLE]


def find_other_format(start: bytes) -> OtherFormat | None:
    """Recognise a format other than FASTA and FASTQ by the decompressed start of a file.

    >>> find_other_format(b"BAM\\1...").name, find_other_format(b">contig1\\nACGT")
    ('BAM', None)
    """
    tar_mark_offset = 257  # after the header of the first file in the archive
    tar_mark = b"ustar"
    byte_order_mark = b"\xef\xbb\xbf"
    text = start.removeprefix(byte_order_mark).lstrip(b"\r\n")
    for other_format, pattern in known_formats():
        if pattern.match(text):
            return other_format
    if b"\0" not in start:
        return None
    if start[tar_mark_offset:].startswith(tar_mark):
        return OtherFormat("a tar archive", _unpack("tar xf"))
    return OtherFormat(
        "a binary file", "give FASTA or FASTQ, plain or compressed with gzip, bzip2, xz or zstd"
    )
