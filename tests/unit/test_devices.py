"""Which devices a run gets, and what is rejected before any work."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import NamedTuple

import pynvml
import pytest
import torch
from run_helpers import our_processes, write_fasta

from virnucpro.cli.main import main
from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.machine import read_machine
from virnucpro.core.recipe import Footprint
from virnucpro.models import devices, nvidia_driver
from virnucpro.models.device_choice import DeviceChoice, choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices, cpu_has_bf16
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model_files import estimate_memory, footprint_of
from virnucpro.models.machine_report import TryGpus, describe_machine, measure_machine
from virnucpro.models.manage import describe_model
from virnucpro.models.nvidia import free_gpus, list_gpus, select_gpus, visible_gpus
from virnucpro.models.registry import FAMILIES
from virnucpro.models.torch_build import TorchBuild, torch_build
from virnucpro.models.triton_kernels import KernelName
from virnucpro.models.validation.compare_reference import try_gpus as try_here

GIB = 1 << 30
WITH_CUDA = TorchBuild("2.13.0", "13.0")
PUBLISHED = FAMILIES["esm2"].published
NO_GPU = not list_gpus()[0]


def footprint(name: str) -> Footprint:
    """The memory needs of a published model."""
    return footprint_of(PUBLISHED[name])


def choose(device, gpus=None, visible=None, workers=None, model_bytes=1) -> DeviceChoice:
    options = ComputeOptions(device=device, gpus=gpus, cuda_visible_devices=visible)
    return choose_devices(options, workers, model_bytes)


class Card(NamedTuple):
    """A GPU: its GiB of memory, and the free part, or the GiB of its MIG slices."""

    name: str
    capability: tuple[int, int]
    total: int = 80
    free: int = 79
    slices: list[int] | None = None


GTX = Card("GTX 1080", (6, 1), 8, 8)
V100 = Card("Tesla V100", (7, 0))
T4 = Card("Tesla T4", (7, 5), 15, 14)
A100 = Card("NVIDIA A100", (8, 0))
A2 = Card("NVIDIA A2", (8, 6), 15, 3)
L4 = Card("NVIDIA L4", (8, 9), 23, 22)
H100 = Card("NVIDIA H100", (9, 0))
H200 = Card("NVIDIA H200", (9, 0), 140, 139)
B200 = Card("NVIDIA B200", (10, 0))
CUT = [A100, A100._replace(slices=[20, 10]), A100._replace(slices=[10])]


def nvml(cards: Sequence[Card], driver: int) -> SimpleNamespace:
    """A stand-in for NVIDIA's library, with a driver's CUDA version and with cards.

    The handle of a card is its index. That of a slice also has the index of the slice.
    """

    def mode_of(card: tuple[int]) -> list[int]:
        if cards[card[0]].slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE] * 2

    def slice_of(card: tuple[int], place: int) -> tuple[int, int]:
        if not 0 <= place - 2 < len(cards[card[0]].slices):  # the first slots are empty
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return (*card, place - 2)

    def uuid_of(handle: tuple[int, ...]) -> str:
        places = "".join(map(str, handle))
        return f"GPU-{'abcd'[handle[0]]}0{places}" if len(handle) == 1 else f"MIG-5{places}"

    def memory_of(handle: tuple[int, ...]) -> SimpleNamespace:
        card = cards[handle[0]]
        total = card.total
        free = card.free
        if len(handle) > 1:
            total = card.slices[handle[1]]
            free = card.slices[handle[1]] - 1
        return SimpleNamespace(total=total * GIB, free=free * GIB)

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        NVML_DEVICE_MIG_ENABLE=pynvml.NVML_DEVICE_MIG_ENABLE,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda index: (index,),
        nvmlDeviceGetMigMode=mode_of,
        nvmlDeviceGetMaxMigDeviceCount=lambda _: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
        nvmlDeviceGetUUID=uuid_of,
        nvmlDeviceGetName=lambda handle: cards[handle[0]].name + " MIG" * (len(handle) - 1),
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlDeviceGetCudaComputeCapability=lambda handle: cards[handle[0]].capability,
    )


@pytest.fixture
def feign(monkeypatch, tmp_path) -> Callable[..., None]:
    """Simulate a machine with these cards, this driver, and this build of torch."""

    def machine(
        cards: Sequence[Card],
        driver: int = 13000,
        build: TorchBuild = WITH_CUDA,
        has_mps: bool = False,
    ) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml(cards, driver))
        monkeypatch.setattr(nvidia_driver, "has_nvml", lambda: bool(cards))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
        if has_mps:
            monkeypatch.setattr(sys, "platform", "darwin")
        facts = f"__version__, cuda = {build.version!r}, {build.cuda!r}\n"
        (tmp_path / "version.py").write_text(facts)
        spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(torch, "__spec__", spec)

    return machine


@pytest.mark.parametrize(
    ("cards", "variable", "expected"),
    [
        *(
            ([H200] * 4, variable, [f"GPU-{'abcd'[place]}0{place}" for place in places])
            for variable, places in (
                (None, [0, 1, 2, 3]),
                ("", []),
                ("2", [2]),
                ("3,1", [3, 1]),
                ("GPU-c02,0", [2, 0]),
                ("GPU-b", [1]),
                ("1,7,2", [1]),  # CUDA ignores what follows a wrong entry
                ("1,1", [1]),
                ("-1", []),
            )
        ),
        (CUT, None, ["GPU-a00"]),
        (CUT, "MIG-511", ["MIG-511"]),
        (CUT, "MIG-511,MIG-520", ["MIG-511"]),  # CUDA shows one to a process
        (CUT, "MIG-51", []),  # ambiguous
        (CUT, "1", ["MIG-510"]),
        (CUT, "GPU-b01", ["MIG-510"]),
        (CUT, "2", ["MIG-520"]),
        (CUT, "0,1", ["GPU-a00"]),
        (CUT[1:2], None, ["MIG-500"]),
        (CUT[1:2], "MIG-777", []),
    ],
)
def test_visible_gpus_equal_cuda(feign, cards, variable, expected):
    feign(cards)
    gpus, reason = list_gpus()
    assert reason == ""
    assert [gpu.uuid for gpu in visible_gpus(gpus, variable)] == expected


def test_slice_uses_its_own_memory(feign):
    feign(CUT)
    choice = choose("auto", visible="MIG-511")
    assert choice.devices == ("cuda:0",) and choice.memory == 9 * GIB
    assert choice.descriptions == ("cuda:0 NVIDIA A100 MIG, 9 of 10 GiB free",)
    assert choose_precision("auto", choice) == "bf16"


def test_mig_card_without_instance_is_reported(feign):
    feign([A100._replace(slices=[])] * 2)
    with pytest.raises(UnavailableError, match="2 cards are in MIG mode, and have no instance"):
        choose("cuda")


# Incompatible drivers, cards and builds of torch

CUDA_12_6 = TorchBuild("2.13.0+cu126", "12.6")


@pytest.mark.parametrize(
    ("cards", "driver", "build", "used"),
    [
        ([H100] * 4, 13000, WITH_CUDA, "0123"),
        ([H100] * 4, 13020, WITH_CUDA, "0123"),
        ([B200] * 4, 13000, TorchBuild("2.14.0", "13.2"), "0123"),  # of the same major version
        ([A100] * 4, 12020, CUDA_12_6, "0123"),
        ([A100] * 4, 13000, CUDA_12_6, "0123"),  # older programs run
        ([V100] * 4, 12080, CUDA_12_6, "0123"),
        ([V100, A100, T4, H100], 13000, CUDA_12_6, "0123"),
        ([V100, A100, T4, H100], 13000, WITH_CUDA, "123"),
        ([H100, V100, V100, T4], 13000, WITH_CUDA, "03"),
    ],
)
@pytest.mark.parametrize(("device", "gpus"), [("auto", None), ("cuda", None), ("auto", "all")])
def test_usable_gpus_are_used(feign, cards, driver, build, used, device, gpus):
    feign(cards, driver, build)
    choice = choose(device, gpus)
    assert choice.devices == tuple(f"cuda:{place}" for place in used)
    text = " ".join(choice.descriptions)
    for place in "0123":
        assert (f"cuda:{place} is left out: Tesla V100 has compute capability 7.0" in text) == (
            place not in used
        )


OLD_DRIVER = (
    "the NVIDIA driver supports CUDA up to {}, and this build of torch (2.13.0) needs CUDA 13"
)
OLD_CARD = "Tesla V100 has compute capability 7.0, and this build of torch (2.13.0), for CUDA 13.0"


@pytest.mark.parametrize(
    ("cards", "driver", "build", "reason", "remedies"),
    [
        ([A100] * 4, 12040, WITH_CUDA, OLD_DRIVER.format("12.4"), {"driver", "cu126"}),
        ([A100] * 4, 11080, WITH_CUDA, OLD_DRIVER.format("11.8"), {"driver"}),
        ([B200] * 4, 12080, WITH_CUDA, OLD_DRIVER.format("12.8"), {"driver"}),
        ([A100] * 4, 11080, CUDA_12_6, "(2.13.0+cu126) needs CUDA 12", {"driver"}),
        ([V100] * 4, 13000, WITH_CUDA, OLD_CARD, {"cu126"}),
        ([V100] * 4, 12040, WITH_CUDA, OLD_CARD, {"cu126"}),
        ([Card("Tesla K80", (3, 7))], 13000, WITH_CUDA, "compute capability 3.7", {"newer GPU"}),
        ([H100] * 4, 13000, TorchBuild("2.13.0+cpu", None), "(2.13.0+cpu) has no CUDA", set()),
    ],
)
def test_unusable_gpus_are_refused_first(feign, cards, driver, build, reason, remedies):
    feign(cards, driver, build)
    for device, gpus in (("cuda", None), ("auto", "all"), ("auto", "0")):
        with pytest.raises(UnavailableError) as caught:
            choose(device, gpus)
        assert caught.value.exit_code == 69
        assert "no GPU can be used: " in str(caught.value) and reason in str(caught.value)
        hint = caught.value.hint
        assert {word for word in ("driver", "cu126", "newer GPU") if word in hint} == remedies
        assert "run on the CPU with --device cpu" in hint
    choice = choose("auto")
    assert choice.kind == "cpu" and reason in choice.descriptions[0]
    text = described()
    assert text.count(f"cannot be used: {reason}" * (reason == OLD_CARD) or reason) == len(cards)
    assert text.count("cannot be used: ") == text.count("remedy: ") == len(cards)
    assert f"NVIDIA driver, CUDA up to {driver // 1000}.{driver % 1000 // 10} " in text


def test_named_unusable_gpu_is_refused(feign):
    feign([V100, A100, T4, H100])
    for gpus in ("0", "1,0", "GPU-a00"):
        with pytest.raises(UnavailableError, match="cuda:0 cannot be used: Tesla V100"):
            choose("auto", gpus)
    choice = choose("auto", "3,1")
    assert choice.devices == ("cuda:3", "cuda:1")
    assert "left out" not in " ".join(choice.descriptions), "nobody asked for the V100"
    text = described()
    assert text.count("cannot be used") == 1 and text.count("bf16, FlashAttention") == 2


def test_gpus_are_chosen_by_index_or_uuid(feign):
    feign([H200] * 4)
    visible = visible_gpus(list_gpus()[0], "3,1,0")
    assert select_gpus("all", visible) == [0, 1, 2]
    assert select_gpus("0,2", visible) == [0, 2]
    assert select_gpus("GPU-b01, GPU-d", visible) == [1, 0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("4", "'4' is not a visible GPU"),
        *((asked, "named twice") for asked in ("0,0", "0,GPU-a00")),
        ("GPU-", "is not a visible GPU"),  # ambiguous
        *((asked, "is not a visible GPU") for asked in ("GPU-x", "", "0,", "-1", "one")),
    ],
)
def test_missing_or_repeated_gpu_is_refused(feign, asked, message):
    feign([H200] * 4)
    gpus, _ = list_gpus()
    with pytest.raises(UsageError, match=message) as caught:
        select_gpus(asked, gpus)
    names = ", ".join(f"{gpu.index}: NVIDIA H200 {gpu.uuid}" for gpu in gpus)
    assert caught.value.hint in (f"visible: {names}", "name it once")


def test_cpu_workers_follow_memory():
    assert choose("cpu", workers=3, model_bytes=10**8).devices == ("cpu",) * 3
    assert choose("cpu", model_bytes=10**15).devices == ("cpu",)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", "0"), ("mps", "all")])
def test_gpus_with_another_device_are_refused(device, gpus):
    with pytest.raises(UsageError, match="does not go with"):
        choose(device, gpus)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", None), ("auto", "0"), ("auto", "all")])
def test_missing_gpu_is_explained(feign, device, gpus):
    feign([])
    with pytest.raises(UnavailableError, match="no GPU can be used: no NVIDIA driver found"):
        choose(device, gpus)


@pytest.mark.parametrize(
    ("has_gpu", "has_mps", "kind"), [(1, 1, "cuda"), (1, 0, "cuda"), (0, 1, "mps"), (0, 0, "cpu")]
)
def test_first_available_device_kind_is_chosen(feign, has_gpu, has_mps, kind):
    feign([A100] * has_gpu, has_mps=bool(has_mps))
    choice = choose("auto")
    assert choice.kind == kind
    (line,) = choice.descriptions
    assert ("no GPU can be used: no NVIDIA driver found" in line) == (kind == "cpu")
    if kind != "cpu":
        with pytest.raises(UsageError, match="--workers is for --device cpu"):
            choose("auto", workers=2)


WIDE = DeviceChoice(("cuda:0",), ("H200",), has_bf16=True, memory=139 * GIB)
OLD = DeviceChoice(("cuda:0",), ("GTX 1080",), has_bf16=False, memory=8 * GIB)
CPU = DeviceChoice(("cpu",), ("CPU",), has_bf16=False, memory=8 * GIB)


def test_torch_is_described_without_import():
    assert torch_build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("vendor", "flags", "is_fast"),
    [
        ("GenuineIntel", "fpu avx512_bf16", False),
        ("GenuineIntel", "fpu avx512_bf16 amx_tile", True),
        ("AuthenticAMD", "fpu avx512_bf16", True),
        ("AuthenticAMD", "fpu avx2", False),
    ],
)
def test_bf16_on_cpus_that_multiply_it_fast(monkeypatch, tmp_path, vendor, flags, is_fast):
    facts = tmp_path / "cpuinfo"
    text = f"vendor_id\t: {vendor}\nmodel name\t: \xae CPU\nflags\t\t: {flags}\n\n"
    facts.write_bytes(2 * text.encode("latin-1"))  # a name may be no UTF-8
    monkeypatch.setattr(devices, "CPU_FACTS", facts)
    assert cpu_has_bf16() == is_fast


@pytest.mark.parametrize(
    ("flags", "has_int8"),
    [
        ("fpu avx2 avx_vnni", True),
        ("fpu avx512f avx512_vnni", True),
        ("fpu amx_tile amx_int8", True),
        ("fpu avx2 avx512f", False),
    ],
)
def test_int8_needs_instructions_for_it(monkeypatch, tmp_path, flags, has_int8):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\n")
    monkeypatch.setattr(devices, "CPU_FACTS", facts)
    choice = choose_devices(ComputeOptions(device="cpu"))
    if has_int8:
        assert choose_precision("int8", choice) == "int8"
    else:
        with pytest.raises(UnavailableError, match="and newer, or a CPU with VNNI"):
            choose_precision("int8", choice)
    assert choose_precision("auto", choice) != "int8"


def test_token_budget_fits_device_and_model():
    sizes = {name: choose_tokens(WIDE, footprint(name), "bf16") for name in PUBLISHED}
    assert sizes["esm2_t33_650M_UR50D"] == 32_768
    assert sizes["esm2_t36_3B_UR50D"] == 16_384
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert choose_tokens(CPU, footprint("esm2_t6_8M_UR50D"), "bf16") == 2048
    narrow = estimate_memory(ESM2Shape(n_layers=6, dim=128, n_heads=4))
    assert choose_tokens(CPU, narrow, "bf16") == 4096
    tight = dataclasses.replace(OLD, memory=2 * GIB)
    assert choose_tokens(tight, footprint("esm2_t36_3B_UR50D"), "bf16") == 2048  # never below
    assert choose_tokens(tight, footprint("esm2_t33_650M_UR50D"), "bf16") < 32_768


def try_gpus(devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return what these GPUs would answer. Triton does not run on the last one."""
    used = dict.fromkeys(("fp8", *KernelName), "")
    refused = {"fp8": "", **dict.fromkeys(KernelName, "CompilationError: no C compiler")}
    return dict(zip(devices, [*[used] * (len(devices) - 1), refused], strict=True))


def described(try_gpus: TryGpus = lambda _: {}) -> str:
    """Return the text of `virnucpro devices` on one line."""
    return " ".join(
        " ".join(describe_machine(measure_machine(None, read_machine({}), try_gpus))).split()
    )


def test_devices_are_described_with_kernels(feign):
    feign([H100, A100, V100, H100], has_mps=True)
    facts = json.loads(json.dumps(measure_machine(None, read_machine({}), try_gpus)))
    h100, a100, v100, refused = facts["gpus"]
    assert (h100["no_fp8"], refused["no_fp8"]) == (None, None)
    assert (a100["no_int8"], v100["no_int8"]) == (
        None,
        "it needs compute capability 8.0; this has 7.0",
    )
    assert a100["no_fp8"] == "it needs compute capability 8.9; this has 8.0"
    assert a100["kernels"] == {**h100["kernels"], "fp8 quantise": a100["no_fp8"]}
    names = "rotation, residual + LayerNorm, fp8 quantise, int8 quantise, DNABERT-S attention"
    assert ", ".join(h100["kernels"]) == names
    assert h100["kernels"]["rotation"] == a100["kernels"]["rotation"] == "used"
    assert v100["cannot_be_used"] and not v100["kernels"], "a GPU without use is not tried"
    assert facts["cpu"]["no_fp8"] and len(set(facts["cpu"]["kernels"].values())) == 1
    text = described(try_gpus)
    assert text.count("fp8 with --precision fp8") == 2
    assert text.count("no fp8: it needs compute capability 8.9; this has 8.0") == 1
    assert text.count("kernels used: rotation, residual + LayerNorm, fp8 quantise, int8") == 1
    assert text.count("int8 with --precision int8") >= 3
    assert text.count("(CompilationError: no C compiler)") == 1
    assert text.count("(they are for NVIDIA GPUs)") == 2, "an Apple GPU, and the CPU"
    lines = describe_machine(measure_machine(None, read_machine({}), try_gpus))
    assert all(len(line) <= 80 or line.startswith(8 * " " + "pip install ") for line in lines)
    assert any("torch<2.15' --index-url https" in line for line in lines), "it is to be copied"


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_untestable_gpu_is_described():
    """This machine has no GPU."""
    (refusals,) = try_here(["cuda:0"]).values()
    assert "Error: " in refusals["fp8"]
    assert refusals == dict.fromkeys(("fp8", "int8", *KernelName), refusals["fp8"])
    assert not our_processes()


# Different GPUs

MEDIUM = footprint("esm2_t33_650M_UR50D")


@pytest.fixture
def chosen(feign) -> Callable[..., DeviceChoice]:
    """Return the devices that a machine with these cards gives."""

    def choose_among(*cards: Card) -> DeviceChoice:
        feign(cards, build=CUDA_12_6)
        return choose("auto")

    return choose_among


PRECISION = r"cuda:2 \(GTX 1080\) is slow in 16 bits.*fp32: leave it out with --gpus 0,1$"
BATCHES = r"cuda:0 \(NVIDIA A2\) .* 11,733 tokens.* 32,768: leave it out with --gpus 1,2$"


@pytest.mark.parametrize(
    ("cards", "is_auto", "words"),
    [
        ([A100, A100, GTX], (True, True), PRECISION),
        ([A100, A100, GTX], (False, True), ""),  # the precision was requested
        ([A2, A100, A100], (True, True), BATCHES),
        ([A2, A100, A100], (True, False), ""),  # the budget was requested
        ([A100, A100], (True, True), ""),
        ([A100, A100._replace(free=70)], (True, True), ""),
        ([A100, T4], (True, False), ""),
        ([], (True, True), ""),
    ],
)
def test_card_that_limits_others_is_named(chosen, cards, is_auto, words):
    lines = chosen(*cards).mixed_gpu_warnings(MEDIUM, "bf16", is_auto)
    assert len(lines) == bool(words)
    assert all(re.match(words, line) for line in lines)


@pytest.mark.parametrize(
    ("cards", "asked", "precision"),
    [
        ([H200], "auto", "bf16"),
        ([H200], "fp32", "fp32"),
        ([T4], "auto", "fp16"),  # no bf16, but fast in fp16
        ([T4], "fp32", "fp32"),
        ([A100, T4], "auto", "fp16"),
        ([A100, A100, GTX], "auto", "fp32"),
        ([GTX], "auto", "fp32"),
        ([GTX], "fp16", "fp16"),
        ([L4, L4], "auto", "bf16"),  # fp8 is never chosen
        ([L4, L4], "fp8", "fp8"),
        ([L4, A100], "int8", "int8"),
    ],
)
def test_precision_is_fast_on_every_gpu(chosen, cards, asked, precision):
    choice = chosen(*cards)
    assert choose_precision(asked, choice) == precision
    if asked == "auto" and cards[0] == A100:
        assert choose_precision("auto", choice.first_device) == "bf16", "by itself"
        assert choice.first_device.memory == 79 * GIB


@pytest.mark.parametrize(
    ("cards", "asked", "message", "hint"),
    [
        ([GTX], "bf16", "--precision bf16", "leave it out"),
        ([], "fp16", "--precision fp16", "leave it out"),
        ([T4], "int8", r"8\.0 and newer, or a CPU with VNNI or AMX, .* cuda:0", "leave it out"),
        ([L4, A100], "fp8", r"cuda:1 \(NVIDIA A100\) has 8\.0$", "alone with --gpus 0"),
        ([], "fp8", r"8\.9 and newer, and this run uses none$", "--device cpu --precision fp8"),
    ],
)
def test_missing_precision_is_refused(chosen, cards, asked, message, hint):
    choice = chosen(*cards)
    with pytest.raises(UnavailableError, match=message) as caught:
        choose_precision(asked, choice)
    assert hint in caught.value.hint


def test_batch_room_follows_weight_precision():
    assert MEDIUM.weight_bytes("fp8") == MEDIUM.weight_bytes("int8") == MEDIUM.n_parameters
    tight = dataclasses.replace(OLD, memory=5 * GIB)
    half, full = (choose_tokens(tight, MEDIUM, precision) for precision in ("fp16", "fp32"))
    # two more bytes for each parameter, and two batches in flight
    assert half - full == pytest.approx(2 * MEDIUM.n_parameters / 2 / MEDIUM.bytes_per_token, abs=1)


def test_model_memory_equals_batch_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in PUBLISHED:
        model = footprint(name)
        memory = model.gpu_memory()
        just = dataclasses.replace(WIDE, memory=memory)
        assert choose_tokens(just, model, "bf16") == choose_tokens(WIDE, model, "bf16")
        less = dataclasses.replace(WIDE, memory=memory * 9 // 10)
        assert choose_tokens(less, model, "bf16") < choose_tokens(WIDE, model, "bf16")
        lines, _ = describe_model(name)
        assert f"GPU memory  {memory / 1e9:.1f} GB for the default batches" in " ".join(lines)


def test_default_run_suggests_free_gpus(feign, monkeypatch, capsys, tmp_path):
    feign([H200, H200._replace(free=20), H200, H200])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    words = ["predict", "-i", str(fasta), "-o", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["virnucpro", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    said = capsys.readouterr().out
    offer = f"virnucpro {' '.join(words)} --model esm2_t33_650M_UR50D --gpus 0,2,3 --force"
    assert f"GPUs: 3 free; with ESM-2 vectors: {offer}\n" in said
    feign([])
    assert free_gpus(None) == []


def test_machine_facts_have_documented_names() -> None:
    facts = json.loads(json.dumps(measure_machine(None, read_machine({}), try_gpus)))
    assert list(facts) == ["torch", "driver_cuda", "gpus", "no_gpu", "mps", "cpu"]
    assert (not facts["gpus"]) == bool(facts["no_gpu"]) == NO_GPU
    text = described()
    assert f"torch {facts['torch']['version']}" in text
    assert f"no GPU: {facts['no_gpu']}" in text or not NO_GPU
    assert f"{facts['cpu']['cores']} core" in text and facts["cpu"]["precision"] in text
    assert 0 < facts["cpu"]["memory_free"] < facts["cpu"]["memory_total"]
    for gpu in facts["gpus"]:
        assert gpu["uuid"] in text and gpu["memory_free"] <= gpu["memory_total"]
