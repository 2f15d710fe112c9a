"""Find the heads of a protein language model in its checkpoint.

A family gives the names of the tensors in a ``HeadScheme``. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from virnucpro.core.model_outputs import Include
from virnucpro.models.checkpoint import Tensors

# our name of a tensor -> its possible names in a checkpoint, of which the first present is read
TensorNames = Mapping[str, tuple[str, ...]]

WITH_LM_HEAD: tuple[Include, ...] = ("logits", "perplexity", "perplexity-single-pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScheme:
    """The names of the tensors of a family's heads. Without names, the family lacks the head.

    Our names are those of ``heads.Heads``: ``lm.dense``, ``lm.norm``, ``lm.decoder`` and
    ``contacts``, each with ``.weight`` and ``.bias``.
    """

    lm: TensorNames
    contacts: TensorNames = field(default_factory=dict)

    def find_includes(self, names: Collection[str]) -> tuple[Include, ...]:
        """Return the values of ``--include`` for a checkpoint with these tensors."""
        includes: list[Include] = []
        if _has_all(self.contacts, names):
            includes.append("contacts")
        if _has_all(self.lm, names):
            includes += WITH_LM_HEAD
        return tuple(includes)

    def read(self, tensors: Tensors) -> dict[str, Any]:
        """Read the tensors of the heads that a checkpoint has, by our names."""
        return {
            name: tensors.get(next(stored for stored in stored_names if stored in tensors.names))
            for part in (self.lm, self.contacts)
            if _has_all(part, tensors.names)
            for name, stored_names in part.items()
        }


def _has_all(part: TensorNames, names: Collection[str]) -> bool:
    return bool(part) and all(
        any(stored in names for stored in stored_names) for stored_names in part.values()
    )
