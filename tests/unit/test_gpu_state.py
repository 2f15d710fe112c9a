"""The state of a GPU from NVML, and the CPU cores of its worker."""

from __future__ import annotations

from ctypes import c_ulonglong
from types import SimpleNamespace

import pynvml
import pytest

from virnucpro.models import gpu_state
from virnucpro.models.gpu_state import (
    GpuState,
    choose_near_cores,
    format_cores,
    list_bits,
    name_slowdowns,
    read_gpu_state,
    read_near_cores,
)


def not_supported(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def feigned_card(monkeypatch) -> SimpleNamespace:
    """Simulate a driver with one hot card at 1,200 of 1,980 MHz, near the cores 64 to 67."""
    library = SimpleNamespace(**vars(pynvml))
    library.nvmlInit = lambda: None
    library.nvmlShutdown = lambda: None
    library.nvmlDeviceGetHandleByUUID = lambda uuid: 0 if uuid == "GPU-a" else not_supported()
    library.nvmlDeviceGetClockInfo = lambda *_: 1200
    library.nvmlDeviceGetMaxClockInfo = lambda *_: 1980
    library.nvmlDeviceGetTemperature = lambda *_: 91
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 1 | 0x20
    library.nvmlDeviceGetTotalEccErrors = lambda *_: 3
    library.nvmlDeviceGetCpuAffinity = lambda *_: (c_ulonglong * 2)(0, 0b1111)
    monkeypatch.setattr(gpu_state, "pynvml", library)
    return library


@pytest.mark.parametrize("uuid", ["a", "GPU-a"], ids=["from CUDA", "from NVML"])
def test_state_of_a_hot_card(feigned_card, uuid):
    state = read_gpu_state(uuid)

    assert state == GpuState(1200, 1980, 91, ("heat",), 3)
    assert state.describe() == [
        "1,200 of 1,980 MHz",
        "91 °C",
        "slowed down by heat",
        "uncorrected ECC errors: 3",
    ]


def test_missing_figures_are_left_out(feigned_card):
    feigned_card.nvmlDeviceGetTotalEccErrors = not_supported
    feigned_card.nvmlDeviceGetClockInfo = not_supported

    assert read_gpu_state("a").describe() == ["91 °C", "slowed down by heat"]


def test_other_card_has_no_state(feigned_card):
    assert read_gpu_state("b") == GpuState()


def test_no_driver_no_state(feigned_card):
    feigned_card.nvmlInit = not_supported

    assert read_gpu_state("a") == GpuState()
    assert read_near_cores("a") == frozenset()


def test_near_cores_are_read_from_the_second_word(feigned_card):
    assert read_near_cores("a") == {64, 65, 66, 67}


@pytest.mark.parametrize(
    ("near", "allowed", "chosen"),
    [
        (range(8), range(16), range(8)),
        (range(8), range(4, 16), range(4, 8)),  # as far as the batch system allows
        (range(8), range(8, 16), range(8, 16)),  # all allowed cores are far
        (range(8), range(7, 16), range(7, 16)),  # one near core is not enough
        ((), range(4), range(4)),  # unknown
    ],
)
def test_worker_keeps_to_near_cores(near, allowed, chosen):
    assert choose_near_cores(set(near), set(allowed)) == set(chosen)


def test_idle_clock_is_no_slowdown():
    assert name_slowdowns(pynvml.nvmlClocksThrottleReasonGpuIdle) == ()


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 3, 8), "0-3,8"), ((9, 1), "1,9")]
)
def test_core_set_as_text(cores, text):
    assert format_cores(cores) == text


def test_bits_from_the_lowest_word():
    assert list(list_bits([0b101, 1 << 63])) == [0, 2, 127]
