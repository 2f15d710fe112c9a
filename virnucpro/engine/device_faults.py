"""Recognise errors that belong to the device, not to the sequences on it.

The words are those of ``cudaGetErrorString`` for the errors after which the CUDA Runtime API
reference (section "Data types used by CUDA Runtime", ``cudaError_t``) asks to end the process, of
NVML's ``nvmlErrorString``, of the driver's Xid messages in the kernel log, and of the status names
of cuBLAS and cuDNN. torch passes them on in the message of an ``AcceleratorError`` or a
``RuntimeError``. A device-side assertion is not among them: it checks what a kernel was given.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# no sequence can cause these
_HARDWARE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error"  # 214, 220
    r"|hardware (?:stack )?error"  # 714
    r"|\bXid\b"
    r"|fallen off the bus"  # Xid 79
    r"|GPU is lost"  # NVML_ERROR_GPU_IS_LOST
    r"|(?:invalid device context|context is destroyed)"  # 201, 709
    r"|context (?:is|was) lost"
    r"|busy or unavailable",  # 46
    re.IGNORECASE,
)
# a broken card causes these, but so does a defect of a kernel that only some sequences meet
_KERNEL = re.compile(
    r"(?:unspecified launch failure|launch failure)"  # 719
    r"|illegal (?:memory access|address|instruction)"  # 700, 715
    r"|misaligned address"  # 716
    r"|invalid program counter"  # 718
    r"|(?:CUBLAS|CUDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    re.IGNORECASE,
)


class DeviceFault(NamedTuple):
    """An error that belongs to the device."""

    name: str  # as in the message, such as "uncorrectable ECC error"
    may_be_input: bool  # a sequence can cause it too, if a kernel has a defect


def find_device_fault(message: str) -> DeviceFault | None:
    """The fault of the device that the message of an error names; None if it names none."""
    if match := _HARDWARE.search(message):
        return DeviceFault(match[0], may_be_input=False)
    if match := _KERNEL.search(message):
        return DeviceFault(match[0], may_be_input=True)
    return None
