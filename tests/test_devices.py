"""Which devices a run gets, and what is refused before any work."""

from __future__ import annotations

import dataclasses

import pytest

from virnucpro import devices
from virnucpro.config import Footprint
from virnucpro.devices import (
    Choice,
    Gpu,
    choose_devices,
    choose_precision,
    choose_tokens,
    default_gpu_memory,
    describe_compromises,
    describe_machine,
    describe_needs,
    list_gpus,
    select_gpus,
    visible_gpus,
)
from virnucpro.encoders.esm2.encoder import footprint_of
from virnucpro.encoders.models import shape_of
from virnucpro.encoders.published import PUBLISHED
from virnucpro.errors import UnavailableError, UsageError

GIB = 1 << 30
GPUS = [
    Gpu(i, f"GPU-{'abcd'[i]}0{i}", "NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0)) for i in range(4)
]
NO_GPU = not list_gpus()[0]


def footprint(name: str) -> Footprint:
    """The room for a published model."""
    shape = shape_of(name)
    return footprint_of(shape, PUBLISHED[name].n_bytes or 2 * shape.n_parameters)


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
        ("4", "'4' is not a visible GPU"),
        ("0,0", "named twice"),
        ("0,GPU-a00", "named twice"),
        ("GPU-", "is not a visible GPU"),  # ambiguous
        ("GPU-x", "is not a visible GPU"),
        ("", "is not a visible GPU"),
        ("0,", "is not a visible GPU"),
        ("-1", "is not a visible GPU"),
        ("one", "is not a visible GPU"),
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


@pytest.mark.parametrize(
    ("has_gpu", "has_mps", "kind"), [(1, 1, "cuda"), (1, 0, "cuda"), (0, 1, "mps"), (0, 0, "cpu")]
)
def test_the_first_kind_of_device_that_is_there_is_taken(monkeypatch, has_gpu, has_mps, kind):
    gpus = [Gpu(0, "GPU-a", "NVIDIA A100", 80 * GIB, 79 * GIB, (8, 0))] * has_gpu
    monkeypatch.setattr(devices, "list_gpus", lambda: (gpus, "no driver (a test)"))
    monkeypatch.setattr(devices.torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices.torch.backends.mps, "is_available", lambda: bool(has_mps))
    choice = choose_devices("auto", None, None, None, model_bytes=1)
    assert choice.kind == kind
    (line,) = choice.descriptions
    assert ("no GPU can be used: no driver (a test)" in line) == (kind == "cpu")
    assert choose_devices("cpu", None, 2, None, model_bytes=1).descriptions[0].endswith("cores")
    if kind != "cpu":
        with pytest.raises(UsageError, match="--workers is for --device cpu"):
            choose_devices("auto", None, 2, None, model_bytes=1)


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
    sizes = {name: choose_tokens(H200, footprint(name)) for name in PUBLISHED}
    assert sizes["esm2_t33_650M_UR50D"] == 32_768
    assert sizes["esm2_t36_3B_UR50D"] == 16_384
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert choose_tokens(CPU, footprint("esm2_t6_8M_UR50D")) == 2048
    tight = dataclasses.replace(OLD, memory=2 * GIB)
    assert choose_tokens(tight, footprint("esm2_t36_3B_UR50D")) == 2048  # never below
    assert choose_tokens(tight, footprint("esm2_t33_650M_UR50D")) < 32_768


def test_the_machine_is_described_with_what_it_lacks():
    lines = "\n".join(describe_machine(None))
    assert "torch" in lines and "cpu " in lines
    assert ("no GPU: " in lines) == NO_GPU


# Unlike GPUs

A100 = Gpu(0, "GPU-a", "NVIDIA A100", 80 * GIB, 79 * GIB, (8, 0))
A2 = Gpu(1, "GPU-b", "NVIDIA A2", 15 * GIB, 3 * GIB, (8, 6))
T4 = Gpu(2, "GPU-c", "Tesla T4", 15 * GIB, 14 * GIB, (7, 5))
GTX = Gpu(3, "GPU-d", "GTX 1080", 8 * GIB, 8 * GIB, (6, 1))
MEDIUM = footprint("esm2_t33_650M_UR50D")
AUTO = (True, True)


def chosen(monkeypatch, *gpus: Gpu) -> Choice:
    """What a machine with these GPUs gives; the driver of this one is not asked."""
    monkeypatch.setattr(devices, "list_gpus", lambda: (list(gpus), ""))
    monkeypatch.setattr(devices.torch.version, "cuda", "13.0")
    return choose_devices("auto", None, None, None, model_bytes=1)


def test_the_card_that_sets_the_precision_of_all_is_named(monkeypatch):
    choice = chosen(monkeypatch, A100, A100, T4)
    assert choose_precision("auto", choice) == "fp32"
    (line,) = describe_compromises(choice, MEDIUM, AUTO)
    assert "cuda:2 (Tesla T4) cannot compute in bf16" in line and "fp32" in line
    assert line.endswith("leave it out with --gpus 0,1")
    assert not describe_compromises(choice, MEDIUM, (False, True)), "precision was asked for"


def test_the_card_that_sets_the_batches_of_all_is_named(monkeypatch):
    choice = chosen(monkeypatch, A2, A100, A100)
    n_tokens = choose_tokens(choice, MEDIUM)
    (line,) = describe_compromises(choice, MEDIUM, AUTO)
    assert "cuda:0 (NVIDIA A2)" in line and f"{n_tokens:,} tokens" in line and "32,768" in line
    assert line.endswith("leave it out with --gpus 1,2")
    assert not describe_compromises(choice, MEDIUM, (True, False)), "the budget was asked for"


def test_gpus_that_are_alike_get_no_warning(monkeypatch):
    assert not describe_compromises(chosen(monkeypatch, A100, A100), MEDIUM, AUTO)
    used = dataclasses.replace(A100, memory_free=70 * GIB)
    assert not describe_compromises(chosen(monkeypatch, A100, used), MEDIUM, AUTO)
    assert not describe_compromises(CPU, MEDIUM, AUTO)


def test_where_fp16_would_be_faster_it_is_said(monkeypatch):
    (line,) = describe_compromises(chosen(monkeypatch, T4), MEDIUM, AUTO)
    assert "--precision fp16" in line
    assert not describe_compromises(chosen(monkeypatch, T4), MEDIUM, (False, True))
    assert not describe_compromises(chosen(monkeypatch, GTX), MEDIUM, AUTO), "it is slow there"


def test_what_a_model_needs_is_what_its_batches_take():
    for name in PUBLISHED:
        model = footprint(name)
        memory = default_gpu_memory(model)
        just = dataclasses.replace(H200, memory=memory)
        assert choose_tokens(just, model) == choose_tokens(H200, model)
        less = dataclasses.replace(H200, memory=memory * 9 // 10)
        assert choose_tokens(less, model) < choose_tokens(H200, model)
        lines = describe_needs(model)
        assert f"{memory / 1e9:.1f} GB for the default batches" in lines[1]
