"""Write names into each output format so that its readers return them, and read them back.

Ids are user text. An id contains no white space and no NUL, and so no tab and no line end. Any
other character may occur anywhere. The rules:

- TSV: a field with a quotation mark is quoted, and each quotation mark in it is doubled (RFC 4180).
  Most table readers follow these conventions. They would join a field that begins with a single
  quotation mark with the lines below it.
- BED: names are not escaped, because they must equal the sequence names. The exceptions are names
  that readers take for a comment or a header line.
- GFF3: percent-encoded as its specification requires
  (github.com/The-Sequence-Ontology/Specifications, gff3.md, version 1.26).
- FASTA: unchanged, because an id ends at white space. ``samtools faidx`` finds them too: it looks
  for the complete name before it looks for positions after a colon.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

_QUOTE = '"'
_BED_ESCAPE = "%"
_GFF3_VALUE = str.maketrans(
    {chr(code): f"%{code:02X}" for code in (*range(32), 127, *map(ord, "%;=&,"))}
)


def tsv_field(text: str) -> str:
    """Format a text as a TSV field.

    >>> tsv_field('contig1'), tsv_field('"contig1')
    ('contig1', '\"\"\"contig1"')
    """
    return f'"{text.replace(_QUOTE, 2 * _QUOTE)}"' if _QUOTE in text else text


def tsv_line(values: Iterable[object]) -> str:
    """Format a TSV line, with its end."""
    return "\t".join(tsv_field(str(value)) for value in values) + "\n"


def read_tsv_field(field: str) -> str:
    """Return a field's text. A field that ``tsv_field`` did not quote is the text itself.

    >>> read_tsv_field(tsv_field('a"b')), read_tsv_field('"')
    ('a"b', '"')
    """
    if len(field) < 2 or not (field.startswith(_QUOTE) and field.endswith(_QUOTE)):
        return field
    text = field[1:-1].replace(2 * _QUOTE, _QUOTE)
    return text if _QUOTE not in text or tsv_field(text) == field else field


def bed_chrom(name: str) -> str:
    """Format a name as the first BED column. Different names stay different.

    >>> bed_chrom("contig1"), bed_chrom("#1"), bed_chrom("track_7"), bed_chrom("%23")
    ('contig1', '%231', '%74rack_7', '%2523')
    """
    # bedtools and genome browsers read a line with such a prefix as a comment or a header.
    if not name.startswith(("#", "track", "browser", _BED_ESCAPE)):
        return name
    return f"%{ord(name[0]):02X}{name[1:]}"


def read_bed_chrom(chrom: str) -> str:
    """Return the name in the first BED column."""
    return unquote(chrom[:3]) + chrom[3:] if chrom.startswith(_BED_ESCAPE) else chrom


def gff3_seqid(name: str) -> str:
    """Format a name as the first GFF3 column.

    >>> gff3_seqid(">a/1"), gff3_seqid("#b|c")
    ('%3Ea%2F1', '%23b|c')
    """
    unescaped = ".:^*$@!+_?-|"  # in addition to letters and digits
    encoded = quote(name, safe=unescaped, errors="surrogateescape")
    return encoded.replace("~", "%7E")  # ``quote`` never encodes it


def gff3_value(text: str) -> str:
    """Format a text as a GFF3 attribute value, such as an ID.

    >>> gff3_value("a/1;b=100%")
    'a/1%3Bb%3D100%25'
    """
    return text.translate(_GFF3_VALUE)
