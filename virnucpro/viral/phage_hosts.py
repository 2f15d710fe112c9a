"""Name the host genus of a phage by its genus or family.

``scripts/weights/build_phage_hosts.py`` made the table, and measures how often it is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, open_regular_file, parse_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.viral.lineage import Taxon

FORMAT = 1


def find_host_genus(taxon: Taxon) -> str:
    """Return the host genus of nearly all phages in a taxon, or "" if it has none.

    The table names genera, and families for phages without a named genus.

    Raises:
        UnavailableError: the table is missing or damaged.
    """
    return load_phage_hosts().get(taxon.genus or taxon.family, "")


@cache
def load_phage_hosts() -> Mapping[str, str]:
    """Return the built-in table, which each process reads once: genus or family -> host genus.

    Raises:
        UnavailableError: it is missing or damaged.
    """
    path = EMBEDDED_FOLDER / "phage_hosts.json"
    try:
        with open_regular_file(path) as handle:
            content = parse_json(handle.read())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}")
        hosts: dict[str, str] = content["hosts"]
        return hosts
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the table of hosts: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error
