"""The works to cite for a result of this program, as text and as BibTeX."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from virnucpro import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A paper, or with a version in place of a journal, a program."""

    key: str  # BibTeX key
    role: str  # part of a result that comes from it
    title: str
    authors: tuple[str, ...]  # family name, comma, given names; or the name of a group
    year: int
    journal: str = ""
    volume: str = ""
    issue: str = ""
    pages: str = ""  # or the number of the article
    doi: str = ""
    version: str = ""
    families: frozenset[str] = frozenset()  # of encoders that need it; none: every result does


WORKS = (
    Work(
        key="virnucpro",
        role="this program",
        title="VirNucPro",
        authors=("The VirNucPro developers",),
        year=2026,
        version=__version__,
    ),
    Work(
        key="lin2023esm2",
        role="ESM-2, the protein language model that embeds each frame",
        title="Evolutionary-scale prediction of atomic-level protein structure with a language "
        "model",
        authors=(
            "Lin, Zeming",
            "Akin, Halil",
            "Rao, Roshan",
            "Hie, Brian",
            "Zhu, Zhongkai",
            "Lu, Wenting",
            "Smetanin, Nikita",
            "Verkuil, Robert",
            "Kabeli, Ori",
            "Shmueli, Yaniv",
            "dos Santos Costa, Allan",
            "Fazel-Zarandi, Maryam",
            "Sercu, Tom",
            "Candido, Salvatore",
            "Rives, Alexander",
        ),
        year=2023,
        journal="Science",
        volume="379",
        issue="6637",
        pages="1123-1130",
        doi="10.1126/science.ade2574",
        families=frozenset({"esm2", "fair-esm"}),
    ),
    Work(
        key="li2025virnucpro",
        role="the original VirNucPro, which defined the chunks, the frames and two of the tables",
        title="VirNucPro: an identifier for the identification of viral short sequences using "
        "six-frame translation and large language models",
        authors=(
            "Li, Jing",
            "Mi, Jia",
            "Lin, Wei",
            "Tian, Fengjuan",
            "Wan, Jing",
            "Gao, Jingyang",
            "Tong, Yigang",
        ),
        year=2025,
        journal="Briefings in Bioinformatics",
        volume="26",
        issue="3",
        pages="bbaf224",
        doi="10.1093/bib/bbaf224",
    ),
    Work(
        key="zhou2025dnaberts",
        role="DNABERT-S, the DNA language model of dnabert-s, virnucpro-300 and virnucpro-500",
        title="DNABERT-S: pioneering species differentiation with species-aware DNA embeddings",
        authors=(
            "Zhou, Zhihan",
            "Wu, Weimin",
            "Ho, Harrison",
            "Wang, Jiayi",
            "Shi, Lizhen",
            "Davuluri, Ramana V.",
            "Wang, Zhong",
            "Liu, Han",
        ),
        year=2025,
        journal="Bioinformatics",
        volume="41",
        issue="Supplement_1",
        pages="i255-i264",
        doi="10.1093/bioinformatics/btaf188",
        families=frozenset({"dnabert-s"}),
    ),
)


def works_of(families: Collection[str]) -> list[Work]:
    """The works to cite for a result of encoders of these families; without any, of the scorer."""
    return [work for work in WORKS if not work.families or not work.families.isdisjoint(families)]


def as_lines(*, bibtex_only: bool) -> Iterator[str]:
    """All works for people, and for BibTeX."""
    if not bibtex_only:
        yield "Please cite:\n"
        for work in WORKS:
            only = " (only for results with --model that used it)" if work.families else ""
            yield f"- {work.role}{only}:\n  {as_text(work)}\n"
        yield "The same as BibTeX (alone: virnucpro cite --bibtex):\n"
    yield "\n\n".join(map(as_bibtex, WORKS))


def as_text(work: Work) -> str:
    """A line of a list of references."""
    authors = ", ".join(map(_short, work.authors))
    if not work.journal:
        return f"{authors} ({work.year}). {work.title}, version {work.version}."
    place = f"{work.journal} {work.volume}({work.issue}), {work.pages}"
    return f"{authors} ({work.year}). {work.title}. {place}. https://doi.org/{work.doi}"


def _short(author: str) -> str:
    """
    >>> _short("dos Santos Costa, Allan")
    'dos Santos Costa A'
    """
    family, _, given_names = author.partition(", ")
    return f"{family} {''.join(name[0] for name in given_names.split())}".rstrip()


def as_bibtex(work: Work) -> str:
    is_group = not any("," in author for author in work.authors)
    authors = " and ".join(work.authors)
    fields = {
        "title": f"{{{work.title}}}",
        "author": f"{{{authors}}}" if is_group else authors,
        "year": str(work.year),
        "journal": work.journal,
        "volume": work.volume,
        "number": work.issue,
        "pages": work.pages.replace("-", "--"),
        "doi": work.doi,
        "note": f"Version {work.version}" if work.version else "",
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{'article' if work.journal else 'misc'}{{{work.key},", *lines, "}"])
