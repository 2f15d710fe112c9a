"""Read the fields of ``ComputeOptions`` that come from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from virnucpro.models.hugging_face import cache_folder


def environment_fields(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of these fields, by name."""
    return {
        "cuda_visible_devices": environ.get("CUDA_VISIBLE_DEVICES"),
        "hugging_face": cache_folder(environ),
        "hdf5_vol_connector": environ.get("HDF5_VOL_CONNECTOR"),
        "slurm": slurm_variables(environ),
    }


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that SLURM sets."""
    return {name: text for name, text in environ.items() if name.startswith("SLURM_")}
