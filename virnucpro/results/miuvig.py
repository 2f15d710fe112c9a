"""Describe each virus in the terms of MIUViG, for a submission to a sequence archive.

The fields are those of the checklist "minimum information about an uncultivated virus genome"
(Roux et al. 2019, doi:10.1038/nbt.4306), with the terms and values of MIxS 7.0.1
(https://w3id.org/mixs). ``taxonomy``, ``topology`` and ``checkv_quality`` are not in the checklist.
Fields that only the submitter knows, such as the source of the sample, are not included.
"""

from __future__ import annotations

from collections.abc import Iterator

from virnucpro._version import __version__
from virnucpro.viral.completeness import CLOSED
from virnucpro.viral.lineage import SEGMENTED, load_builtin_lineages
from virnucpro.viral.types import CalledRecords, Identity

# Genome type as ICTV writes it, or group -> term of MIUViG.
_GENOME_TYPES = {
    "dsDNA": "dsDNA",
    "ssDNA": "ssDNA",
    "ssDNA(+)": "ssDNA",
    "ssDNA(-)": "ssDNA",
    "ssDNA(+/-)": "ssDNA",
    "dsRNA": "dsRNA",
    "ssRNA(+)": "ssRNA (+)",
    "ssRNA(-)": "ssRNA (-)",
    "ssRNA(+/-)": "ssRNA",
    "ssRNA(-); ssRNA(+/-)": "ssRNA",
    "ssRNA": "ssRNA",
    "dsDNA-RT": "dsDNA",
    "ssRNA-RT": "ssRNA (+)",
    "RNA+": "ssRNA (+)",
    "RNA-": "ssRNA (-)",
}
_HIGH_QUALITY = 90.0  # percent of a genome
_MEDIUM_QUALITY = 50.0


def miuvig_rows(results: CalledRecords) -> Iterator[tuple[str, ...]]:
    """Yield the values for each virus. A virus without bases has few."""
    software = f"VirNucPro;{__version__}"
    release = load_builtin_lineages().release
    detection = {"whole": "independent sequence (UViG)", "provirus": "provirus (UpViG)"}
    viruses = results.viruses
    has_genes = [False] * len(viruses.record_indices)
    if viruses.genes is not None:
        has_genes = (viruses.genes.n_per_virus > 0).tolist()
    tax_class = f"{software};references from {release}, lowest supported rank"
    gene_fields = (
        f"{software};predict",
        f"VirNucPro index of known viruses;{__version__};{release}",
        f"{software};k-mers of nine residues in common",
    )
    for index, record in enumerate(viruses.record_indices):
        identity = viruses.identities[index]
        yield (
            viruses.names[index],
            results.calls.samples[record],
            detection[viruses.extents[index]],
            genome_type(identity),
            genome_structure(identity),
            "circular" if identity.topology == "circular" else "linear",
            "1",
            assembly_quality(identity),
            completeness_score(identity),
            software if identity.completeness is not None else "",
            completeness_approach(identity),
            checkv_quality(identity),
            identity.taxonomy,
            "other" if identity.taxonomy else "",
            tax_class if identity.taxonomy else "",
            *host_prediction(identity, viruses.extents[index]),
            f"{software};predict",
            *(gene_fields if has_genes[index] else ("", "", "")),
        )


def genome_type(identity: Identity) -> str:
    """Return the genome type by ICTV, else by the group.

    >>> genome_type(Identity(genome_type="ssRNA(-)")), genome_type(Identity(group="phage"))
    ('ssRNA (-)', 'uncharacterized')
    """
    unknown = "uncharacterized"
    return _GENOME_TYPES.get(identity.genome_type or identity.group, unknown)


def genome_structure(identity: Identity) -> str:
    """Return whether the genome of the taxon has several molecules."""
    if identity.completeness_method == SEGMENTED:
        return "segmented"
    is_known = identity.completeness_method.endswith(" length")
    return "non-segmented" if is_known else "undetermined"


def assembly_quality(identity: Identity) -> str:
    """Return the quality of the genome. A finished genome needs manual review."""
    is_high = (identity.completeness or 0) >= _HIGH_QUALITY
    return "High-quality draft genome" if is_high else "Genome fragment(s)"


def completeness_score(identity: Identity) -> str:
    """Return the estimated completeness: a word, and the percentage.

    >>> completeness_score(Identity(completeness=72.5)), completeness_score(Identity())
    ('med;72.5%', '')
    """
    percent = identity.completeness
    if percent is None:
        return ""
    word = "high" if percent >= _HIGH_QUALITY else "med" if percent >= _MEDIUM_QUALITY else "low"
    return f"{word};{percent:.1f}%"


def completeness_approach(identity: Identity) -> str:
    """Return how the completeness was estimated, empty without an estimate.

    >>> completeness_approach(Identity(completeness=72.5, completeness_method="genus length"))
    'reference based'
    """
    if identity.completeness is None:
        return ""
    return "other" if identity.completeness_method in CLOSED else "reference based"


def host_prediction(identity: Identity, extent: str) -> tuple[str, str]:
    """Return the approach that found the host, and its accuracy. Both may be empty.

    The host of a provirus is the organism of its record. ``build_phage_hosts.py`` measures the
    accuracy of the others.

    >>> host_prediction(Identity(genus="Lambdavirus", host_genus="Escherichia"), "whole")
    ('other', 'host genus of ICTV isolates in the same genus: 98.5% right for other species')
    """
    if extent == "provirus":
        return "provirus", ""
    if not identity.host_genus:
        return "", ""
    if identity.genus:
        relatives = "in the same genus: 98.5% right for other species"
    else:
        relatives = "in the same family: 95.7% right for other genera"
    return "other", f"host genus of ICTV isolates {relatives}"


def checkv_quality(identity: Identity) -> str:
    """Return the quality in CheckV's words.

    >>> checkv_quality(Identity(completeness=100.0, completeness_method="DTR"))
    'Complete'
    """
    percent = identity.completeness
    if percent is None:
        return "Not-determined"
    if identity.completeness_method in CLOSED:
        return "Complete"
    if percent >= _HIGH_QUALITY:
        return "High-quality"
    return "Medium-quality" if percent >= _MEDIUM_QUALITY else "Low-quality"
