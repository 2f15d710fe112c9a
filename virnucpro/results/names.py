"""Write names into each output format so that its readers return them, and read them again.

Ids are text of the user. An id has no white space and no NUL, so it has no tab and no line end of
any kind. Any other character may occur at any place. The rules:

- TSV: a field with a quotation mark is enclosed in quotation marks, and each one in it is doubled
  (RFC 4180). Most readers of tables follow these conventions. They would join a field that begins
  with a single quotation mark with the lines below it.
- BED: names are not escaped, because they must equal those of the sequences. The exceptions are
  names that readers take for a comment or a header line.
- GFF3: percent-encoded as its specification requires
  (github.com/The-Sequence-Ontology/Specifications, gff3.md, version 1.26).
- FASTA: unchanged, because an id ends at white space. ``samtools faidx`` finds them too: it looks
  for the complete name before it looks for positions behind a colon.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

_QUOTE = '"'
# bedtools and genome browsers read a line that begins so as a comment or a header
_BED_HEADERS = ("#", "track", "browser")
_BED_ESCAPE = "%"
# unescaped in a sequence id of GFF3, besides letters and digits
_GFF3_SEQID = ".:^*$@!+_?-|"
_GFF3_RESERVED = {chr(code): f"%{code:02X}" for code in (*range(32), 127, *map(ord, "%;=&,"))}
_GFF3_VALUE = str.maketrans(_GFF3_RESERVED)


def tsv_field(text: str) -> str:
    """A text as a field of a TSV table.

    >>> tsv_field('contig1'), tsv_field('"contig1')
    ('contig1', '\"\"\"contig1"')
    """
    return f'"{text.replace(_QUOTE, 2 * _QUOTE)}"' if _QUOTE in text else text


def tsv_line(values: Iterable[object]) -> str:
    """A line of a TSV table, with its end."""
    return "\t".join(tsv_field(str(value)) for value in values) + "\n"


def read_tsv_field(field: str) -> str:
    """The text of a field; one that is not quoted as in ``tsv_field`` is the text itself.

    >>> read_tsv_field(tsv_field('a"b')), read_tsv_field('"')
    ('a"b', '"')
    """
    if len(field) < 2 or not (field.startswith(_QUOTE) and field.endswith(_QUOTE)):
        return field
    text = field[1:-1].replace(2 * _QUOTE, _QUOTE)
    return text if _QUOTE not in text or tsv_field(text) == field else field


def bed_chrom(name: str) -> str:
    """A name as the first column of BED; different names stay different.

    >>> bed_chrom("contig1"), bed_chrom("#1"), bed_chrom("track_7"), bed_chrom("%23")
    ('contig1', '%231', '%74rack_7', '%2523')
    """
    if not name.startswith((*_BED_HEADERS, _BED_ESCAPE)):
        return name
    return f"%{ord(name[0]):02X}{name[1:]}"


def read_bed_chrom(chrom: str) -> str:
    """The name in the first column of BED."""
    return unquote(chrom[:3]) + chrom[3:] if chrom.startswith(_BED_ESCAPE) else chrom


def gff3_seqid(name: str) -> str:
    """A name as the first column of GFF3.

    >>> gff3_seqid(">a/1"), gff3_seqid("#b|c")
    ('%3Ea%2F1', '%23b|c')
    """
    encoded = quote(name, safe=_GFF3_SEQID, errors="surrogateescape")
    return encoded.replace("~", "%7E")  # which ``quote`` never encodes


def gff3_value(text: str) -> str:
    """A text as the value of an attribute of GFF3, such as an ID.

    >>> gff3_value("a/1;b=100%")
    'a/1%3Bb%3D100%25'
    """
    return text.translate(_GFF3_VALUE)
