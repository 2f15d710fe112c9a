"""The names of models that options, messages and earlier runs use."""

from __future__ import annotations

DEFAULT_MODEL = "esm2_t33_650M_UR50D"  # used where a model is needed and none is named
TINY_MODEL = "virnucpro-tiny"  # built in, with a head, trained by this project
TINY_NOTICE = "built-in demonstration model, not Meta's ESM-2 weights"
# Former model names. Options, heads and run.json from older versions may contain them.
EARLIER_NAMES = {"esm2_virnucpro": TINY_MODEL}


def current_name(model: str) -> str:
    """Return the current name of a model. Other names and paths are returned unchanged.

    >>> current_name("esm2_virnucpro"), current_name("./esm2_virnucpro")
    ('virnucpro-tiny', './esm2_virnucpro')
    """
    return EARLIER_NAMES.get(model, model)
