"""Which devices a run gets, and what is refused before any work."""

from __future__ import annotations

import dataclasses

import pytest

from virnucpro.devices import (
    Choice,
    Gpu,
    choose_devices,
    choose_precision,
    choose_tokens,
    describe_machine,
    list_gpus,
    select_gpus,
    visible_gpus,
)
from virnucpro.errors import UnavailableError, UsageError
from virnucpro.esm2.download import PUBLISHED

GIB = 1 << 30
GPUS = [
    Gpu(i, f"GPU-{'abcd'[i]}0{i}", "NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0)) for i in range(4)
]
NO_GPU = not list_gpus()[0]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        ("GPU-c02,0", [2, 0]),
        ("GPU-b", [1]),
        ("1,7,2", [1]),  # CUDA ignores what follows a wrong entry
        ("1,1", [1]),
        ("-1", []),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_shows(variable, expected):
    assert [gpu.index for gpu in visible_gpus(GPUS, variable)] == expected


def test_gpus_are_chosen_among_the_visible_by_place_or_uuid():
    visible = visible_gpus(GPUS, "3,1,0")
    assert select_gpus("all", visible) == [0, 1, 2]
    assert select_gpus("0,2", visible) == [0, 2]
    assert select_gpus("GPU-b01, GPU-d", visible) == [1, 0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("4", "'4' is no visible GPU"),
        ("0,0", "named twice"),
        ("0,GPU-a00", "named twice"),
        ("GPU-", "is no visible GPU"),  # ambiguous
        ("GPU-x", "is no visible GPU"),
        ("", "is no visible GPU"),
        ("0,", "is no visible GPU"),
        ("-1", "is no visible GPU"),
        ("one", "is no visible GPU"),
    ],
)
def test_a_gpu_that_is_not_there_or_twice_is_refused_by_name(asked, message):
    with pytest.raises(UsageError, match=message):
        select_gpus(asked, GPUS)


def test_a_refusal_lists_what_is_visible():
    with pytest.raises(UsageError) as caught:
        select_gpus("9", GPUS[:1])
    assert caught.value.hint == "visible: 0: NVIDIA H200 GPU-a00"


def test_cpu_workers_are_as_many_as_asked_for():
    choice = choose_devices("cpu", None, 3, None, model_bytes=10**8)
    assert choice.devices == ("cpu",) * 3
    assert choice.kind == "cpu"


def test_cpu_workers_are_no_more_than_memory_holds_models():
    assert choose_devices("cpu", None, None, None, model_bytes=10**15).devices == ("cpu",)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", "0"), ("mps", "all")])
def test_gpus_do_not_go_with_another_device(device, gpus):
    with pytest.raises(UsageError, match="does not go with"):
        choose_devices(device, gpus, None, None, model_bytes=1)


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize(("device", "gpus"), [("cuda", None), ("auto", "0"), ("auto", "all")])
def test_without_a_gpu_asking_for_one_says_why_there_is_none(device, gpus):
    with pytest.raises(UnavailableError, match=r"no GPU can be used: ."):
        choose_devices(device, gpus, None, None, model_bytes=1)


H200 = Choice(("cuda:0",), ("H200",), has_bf16=True, memory=139 * GIB)
OLD = Choice(("cuda:0",), ("GTX 1080",), has_bf16=False, memory=8 * GIB)
CPU = Choice(("cpu",), ("CPU",), has_bf16=False, memory=8 * GIB)


def test_auto_precision_is_bf16_where_the_device_has_it():
    assert choose_precision("auto", H200) == "bf16"
    assert choose_precision("auto", OLD) == "fp32"
    assert choose_precision("fp16", OLD) == "fp16"
    assert choose_precision("fp32", H200) == "fp32"


@pytest.mark.parametrize(("asked", "choice"), [("bf16", OLD), ("fp16", CPU)])
def test_a_precision_that_the_device_lacks_is_refused(asked, choice):
    with pytest.raises(UnavailableError, match=f"--precision {asked}"):
        choose_precision(asked, choice)


def test_the_token_budget_fits_the_device_and_the_model():
    sizes = {name: choose_tokens(H200, shape) for name, shape in PUBLISHED.items()}
    assert sizes["esm2_t33_650M_UR50D"] == 32_768
    assert sizes["esm2_t36_3B_UR50D"] == 16_384
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert choose_tokens(CPU, PUBLISHED["esm2_t6_8M_UR50D"]) == 2048
    tight = dataclasses.replace(OLD, memory=2 * GIB)
    assert choose_tokens(tight, PUBLISHED["esm2_t36_3B_UR50D"]) == 2048  # never below
    assert choose_tokens(tight, PUBLISHED["esm2_t33_650M_UR50D"]) < 32_768


def test_the_machine_is_described_with_what_it_lacks():
    lines = "\n".join(describe_machine(None))
    assert "torch" in lines and "cpu " in lines
    assert ("no GPU: " in lines) == NO_GPU
