"""Check for an NVIDIA driver, without which no other code for NVIDIA GPUs is imported."""

from __future__ import annotations

from ctypes import CDLL

NO_DRIVER = "no NVIDIA driver found"


def has_nvml() -> bool:
    """Return True if an NVIDIA driver is installed. This is cheaper than importing pynvml."""
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
