"""Import directions between packages, limits on complexity, and calls that no module may make."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from complexipy import code_complexity
from source_trees import ROOT, path_of, tree_of

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if not path.stem.startswith("__")
)
VOCABULARY = [
    f"core.{name}" for name in ("errors", "types", "recipe", "events", "atomic_io", "logging")
]
MODEL = [
    name
    for name in MODULES
    if name.startswith(("models.esm2.", "models.esmc.", "models.dnabert_s."))
    and name != "models.esmc.reference"
]
MODEL += [
    f"models.{name}"
    for name in (
        *("attention", "checkpoint", "checkpoint_model", "converted", "eight_bits", "packing"),
        *("head_tensors", "heads", "output_pass", "output_choice"),
        *("pooling", "protein_tokens", "sample_proteins", "smoothing", "transformer"),
        *("transformer_encoder", "triton_kernels"),
        *("attention_tiles", "triton_tiles"),
    )
]
# tensors in, tensors out
MODEL_MAY_USE = {
    f"core.{name}"
    for name in ("errors", "logging", "option_text", "atomic_io", "native", "safe_dir")
}
MODEL_MAY_USE |= {
    "core.model_outputs",
    "core.option_text",
    "core.recipe",
    "core.events",
    "models.base",
    "models.family",
    "models.registry",
    "models.safe_pickle",
}
LONGEST_FUNCTION = 60
COMMAND_LINE = [name for name in MODULES if name.startswith("cli.")]

RUN_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.jit.load"}
RUN_CODE |= {"torch.hub.load", "torch.package.PackageImporter", "os.execv", "os.execvp"}
PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imported(name: str) -> Iterator[str]:
    return imports_in(tree_of(name))


def imports_in(tree: ast.AST) -> Iterator[str]:
    """Return the absolute names of all imported modules, anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = [f"{module}.{alias.name}" for alias in node.names]
            packages = [found for found in inside if is_module(found)]
            yield from packages or [module]


def is_module(name: str) -> bool:
    head, _, rest = name.partition(".")
    return head == "virnucpro" and path_of(rest).is_file()


def used_by(name: str) -> set[str]:
    """Return the modules of VirNucPro that a module imports."""
    return {
        found.removeprefix("virnucpro.")
        for found in imported(name)
        if found.startswith("virnucpro.")
    }


# Order

COMPLEX = 15  # limit on cognitive complexity


def test_imports_have_no_cycle() -> None:
    TopologicalSorter({name: used_by(name) for name in MODULES}).prepare()


def test_test_modules_import_no_other_test_module() -> None:
    """Shared code is in helper modules, next to ``conftest``."""
    importers = [
        path.name
        for path in Path(__file__).parents[1].rglob("*.py")
        for name in imports_in(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0].startswith("test_")
    ]
    assert not importers


# what an extraction, or its share of the work, never imports at first
OTHER_COMMANDS = ("viral.", "training.", "results.report.", "api")
# each is imported only where input, machine or options need it
OPTIONAL = {
    *(
        "core.plugins",
        "store.feature_export",
        "sequences.fastq",
        "sequences.translate",
        "sequences.spans",
        "sequences.sample_sheet",
    ),
    *("sequences.input_folder", "sequences.input_copies", "sequences.other_formats"),
    *("models.nvidia", "models.download", "store.manifest_reader", "store.plan_reader"),
    *("store.recipe_changes", "workflows.extend_inputs", "results.sample_writer"),
    *("results.sorted_lines", "cli.completion_scripts", "cli.help_page", "cli.usage_errors"),
    *("engine.event_log", "engine.work_options"),
}


def imported_at_first(name: str) -> set[str]:
    """Return the modules that Python loads with a module, without imports inside functions."""
    loaded = {name}
    waiting = [name]
    while waiting:
        tree = tree_of(waiting.pop())
        statements = ast.Module([node for node in tree.body if is_import(node)], [])
        new = {found.removeprefix("virnucpro.") for found in imports_in(statements)} - loaded
        new &= set(MODULES)
        loaded |= new
        waiting += new
    return loaded


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


@pytest.mark.parametrize("command", ["extract", "work"])
def test_extraction_loads_no_other_command(command: str) -> None:
    workflow = {"extract": "extract", "work": "work_share"}[command]
    loaded = imported_at_first(f"cli.{command}") | imported_at_first(f"workflows.{workflow}")
    loaded |= imported_at_first("cli.main")
    assert "engine.local" in loaded and "store.plan" in loaded
    assert not [name for name in loaded if name.startswith(OTHER_COMMANDS)]
    if command == "extract":
        assert set(MODULES) >= OPTIONAL
        assert not loaded & OPTIONAL


def test_functions_are_easy_to_follow() -> None:
    complex_ones = [
        f"{name}: {function.name}"
        for name in MODULES
        for function in code_complexity(path_of(name).read_text(encoding="utf-8")).functions
        if function.complexity > COMPLEX
    ]
    assert len(complex_ones) <= 2, complex_ones


def test_packages_import_nothing_of_their_own() -> None:
    """An ``__init__`` that imports its package would make every import slow.

    The package's own ``__init__`` names the public interface, for type checkers only.
    """
    for path in ROOT.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.parent == ROOT:
            tree.body = [node for node in tree.body if not is_for_type_checkers(node)]
        names = {
            name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        }
        allowed = {"importlib", "import_module", "typing", "TYPE_CHECKING"}
        allowed |= {"virnucpro._version", "__version__"}
        assert names <= allowed, path


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_core_types_need_only_numpy() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "virnucpro"}
    for name in VOCABULARY:
        zstd = {"backports", "compression"} if name == "core.atomic_io" else set()
        packages = {found.partition(".")[0] for found in imported(name)}
        assert packages <= allowed | zstd, name


def test_models_know_no_fasta_or_run_folder() -> None:
    for name in MODEL:
        assert {used for used in used_by(name) if used not in MODEL} <= MODEL_MAY_USE, name


def test_only_engine_and_benchmark_start_processes() -> None:
    """The benchmark runs other programs in single-threaded processes, as the engine runs ours.

    Our Triton kernels use only the error class of a compiler that Triton runs.
    """
    users = {
        name
        for name in MODULES
        for found in imported(name)
        if found.partition(".")[0] in ("multiprocessing", "subprocess")
    }
    assert users == {"core.child_process", "models.triton_kernels"}


# Imports at run time


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_core_loads_without_torch_or_h5py() -> None:
    statement = "import " + ", ".join(f"virnucpro.{name}" for name in VOCABULARY)
    assert not {"torch", "h5py", "safetensors", "Bio"} & loaded_after(statement)


def test_jinja_is_imported_only_to_write_a_page() -> None:
    """The import takes time, and trainings and ``cite`` read the same module."""
    statement = (
        "import virnucpro.training.reports, virnucpro.results.report.run_report; "
        "from virnucpro.results.report.html import render; "
        "from virnucpro.results.report.cite import cite_program; "
        "list(cite_program(bibtex_only=False))"
    )
    assert not {"jinja2", "markupsafe"} & loaded_after(statement)
    writing = (
        "; render('training.html', dict(charts=[], tables=[], complaints=[], provenance=[]), {})"
    )
    assert {"jinja2", "markupsafe"} <= loaded_after(statement + writing)


def test_worker_start_imports_no_compiler() -> None:
    """These imports take more than a second in every new worker."""
    statement = (
        "import virnucpro.workflows.extract, virnucpro.workflows.predict, torch; "
        "from virnucpro.models.lookup import embedded_model; "
        "from virnucpro.models.esm2.loading import load_esm2; "
        "from virnucpro.models.packing import PackedBatch; "
        "model = load_esm2(embedded_model(), 1, torch.bfloat16, torch.device('cpu')); "
        "torch.inference_mode()(model)(PackedBatch.from_sequences(['MKV']))"
    )
    assert not {"torch._dynamo", "sympy"} & loaded_after(statement)


# Forbidden code: each check yields what it finds in a module. Relative imports and prints are
# refused by ruff (TID252, T201).


Check = Callable[[ast.Module], Iterator[object]]


def nodes_of(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def calls_in(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    return ((ast.unparse(node.func), node) for node in nodes_of(tree, ast.Call))


def code_that_is_read_and_run(tree: ast.Module) -> Iterator[object]:
    """Return calls that run code: unpickling other than torch's own, code from text, and shells."""
    for function, call in calls_in(tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_wrong = (
            function in RUN_CODE
            or {"shell", "trust_remote_code"} & set(given)
            or (function == "torch.load" and given.get("weights_only") != "True")
            or (function.endswith("p.load") and given.get("allow_pickle") != "False")
            or (function.startswith("yaml.") and not function.startswith("yaml.safe_load"))
        )
        if is_wrong and function != "yaml.SafeLoader":
            yield call.lineno


def picklers(tree: ast.Module) -> Iterator[object]:
    """Return all uses of pickle except its error class."""
    yield from {found.partition(".")[0] for found in imports_in(tree)} & PICKLERS
    for node in nodes_of(tree, ast.Attribute):
        if ast.unparse(node.value) == "pickle" and node.attr != "UnpicklingError":
            yield node.lineno
    for node in nodes_of(tree, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if node.module in ("pickle", "yaml") or (node.module == "torch" and "load" in names):
            yield node.lineno


def functions_longer_than_a_page(tree: ast.Module) -> Iterator[object]:
    for node in nodes_of(tree, ast.FunctionDef, ast.AsyncFunctionDef):
        if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
            yield node.name


def state_that_changes(tree: ast.Module) -> Iterator[object]:
    return (node.lineno for node in nodes_of(tree, ast.Global))


def variables_of_the_environment(tree: ast.Module) -> Iterator[object]:
    variables = {"environ", "environb", "getenv", "putenv"}
    for node in nodes_of(tree, ast.Attribute):
        if node.attr in variables and ast.unparse(node.value) == "os":
            yield node.lineno
    for node in nodes_of(tree, ast.ImportFrom):
        if node.module == "os":
            yield from variables & {alias.name for alias in node.names}


# models.packing only sets there what MKL must know, which has no other switch in torch
ENVIRONMENT = (*COMMAND_LINE, "api", "models.packing")
# packages that write into a run folder, and calls that would do so by a path
IN_A_RUN_FOLDER = [
    name
    for name in MODULES
    if name.partition(".")[0] in ("store", "results", "engine", "workflows", "api")
] + ["sequences.inputs"]
BY_PATH = {"unlink", "rmdir", "mkdir", "rename", "touch", "write_text", "write_bytes"}
BY_PATH |= {"symlink_to", "hardlink_to"}
# the run folder itself may be a link, and is made as one
ROOT_MAKERS = {"self.root.mkdir": "store.run_dir", "folder.mkdir": "api"}
ROOT_MAKERS |= {"folder.path.mkdir": "engine.vector_cache"}
# the user names it, outside of the run folder
ROOT_MAKERS |= {"parent.mkdir": "workflows.export"}


def writing_that_follows_links(tree: ast.Module) -> Iterator[object]:
    """Return calls that write or delete in a run folder without ``SafeDir``."""
    for function, call in calls_in(tree):
        by_path = function.rpartition(".")[2] in BY_PATH
        makes_root = function in ROOT_MAKERS and tree is tree_of(ROOT_MAKERS[function])
        if (by_path and not makes_root) or function in ("os.replace", "os.remove"):
            yield call.lineno
    for node in nodes_of(tree, ast.ImportFrom):
        if node.module == "virnucpro.core.atomic_io":
            yield from {"atomic"} & {alias.name for alias in node.names}


CHECKS: list[tuple[Check, Sequence[str]]] = [
    (code_that_is_read_and_run, MODULES),
    (picklers, MODULES),
    (functions_longer_than_a_page, MODULES),
    (state_that_changes, MODULES),
    (variables_of_the_environment, [name for name in MODULES if name not in ENVIRONMENT]),
    (writing_that_follows_links, IN_A_RUN_FOLDER),
]
BAD = ast.parse(
    """import pickle, dill
from os import getenv
pickle.loads(b'')
def f():
    global g
    eval('1'); torch.load('x'); np.load('y'); p.unlink()"""
    + LONGEST_FUNCTION * "\n"
    + "    return os.environ"
)


@pytest.mark.parametrize(("check", "names"), CHECKS, ids=lambda one: getattr(one, "__name__", ""))
def test_modules_pass_checks_that_bad_code_fails(check: Check, names: Sequence[str]) -> None:
    assert len(names) > 40
    assert list(check(BAD))
    assert not [f"{name}: {found}" for name in names for found in check(tree_of(name))]
