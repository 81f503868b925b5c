"""Package boundaries: which imports are allowed, which are not, and what the wheel ships."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "runtime", "model_zoo", "attention")  # each may import those after it
FOR_SERVER = {
    "runtime.messages",
    "runtime.snapshot",
    "runtime.stats",
    "runtime.config",
    "runtime.host_memory",
    "runtime.ipc.client",
    "runtime.logs",
}
# The folders and files of runtime/ that decide what runs, without tensors: the host side.
HOST_SIDE = (
    "ipc",
    "routing",
    "scheduler",
    "grammar",
    "engine",
    "bounded_stream",
    "config",
    "host_memory",
    "kv_capacity",
    "logs",
    "memory_plan",
    "messages",
    "snapshot",
    "stats",
)
# Main modules of processes, which join the two sides.
JOINT = ("runtime.engine.process", "runtime.engine.rank_process")
# What the device side, the rest of runtime/, knows of the host side: values, never decisions.
FOR_DEVICE_SIDE = {
    "runtime.scheduler.batch",
    "runtime.config",
    "runtime.host_memory",
    "runtime.memory_plan",
    "runtime.messages",
    "runtime.snapshot",
    "runtime.stats",
}
FOUNDATIONS = {"torch", "triton", "numpy", "transformers", "safetensors"}
ARRAYS = "runtime.scheduler"  # keeps the sequences that decode in columns of numpy
MAX_MODULES = 15  # of a folder
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in PACKAGES for path in source_files(package)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def names_in(node: ast.AST, path: Path) -> Iterator[str]:
    """The modules that one statement imports, relative ones made absolute."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module_name(path).split(".")
            if path.name != "__init__.py":
                package = package[:-1]
            above = package[: len(package) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        submodules = [f"{base}.{alias.name}" for alias in node.names]
        known = [name for name in submodules if name in MODULES]
        yield from known
        if len(known) < len(submodules):
            yield base


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module that a file names, wherever in it: in functions and under TYPE_CHECKING too."""
    return frozenset(name for node in ast.walk(tree_of(path)) for name in names_in(node, path))


def edges() -> Iterator[tuple[str, str]]:
    for module, path in MODULES.items():
        for name in imports_of(path):
            yield module, name


def top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import runtime.engine.loop as e", {"runtime.engine.loop"}),
        ("from runtime.engine import loop", {"runtime.engine.loop"}),
        ("from .errors import RequestError", {"server.errors"}),
        ("from ..errors import RequestError", {"errors"}),
        ("from . import state", {"server.state"}),
        ("def f():\n    import torch", {"torch"}),
        ("if TYPE_CHECKING:\n    from torch import Tensor", {"torch"}),
    ],
)
def test_every_form_of_import_is_seen(line: str, expected: set[str]) -> None:
    path = ROOT / "server" / "app.py"
    seen = {name for node in ast.walk(ast.parse(line)) for name in names_in(node, path)}
    assert seen == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_modules(package: str) -> None:
    assert len(source_files(package)) > 3, f"the walls of an empty {package}/ guard nothing"


def test_imports_go_from_server_to_runtime_to_model_zoo_to_attention() -> None:
    upward = [
        f"{module} imports {name}"
        for module, name in edges()
        if top(name) in PACKAGES and PACKAGES.index(top(name)) < PACKAGES.index(top(module))
    ]
    assert upward == []


def test_product_code_imports_neither_tests_nor_benchmarks() -> None:
    assert [edge for edge in edges() if top(edge[1]) in {"tests", "benchmarks", "deploy"}] == []


def test_server_imports_nothing_below_but_messages_config_and_client() -> None:
    found = [
        f"{module} imports {name}"
        for module, name in edges()
        if top(module) == "server" and top(name) in PACKAGES[1:] and name not in FOR_SERVER
    ]
    assert found == []


def test_what_routes_work_with_knows_no_routes() -> None:
    routes = {
        name for name, path in MODULES.items() if "\nendpoints = Endpoints(" in path.read_text()
    }
    users = {module for module, name in edges() if name in routes}
    assert len(routes) > 10
    assert users - routes == {"server.app"}


def test_server_names_no_tensor_library() -> None:
    tensors = {"torch", "triton", "safetensors"}
    assert [e for e in edges() if top(e[0]) == "server" and top(e[1]) in tensors] == []


def on_host_side(module: str) -> bool:
    parts = module.split(".")
    return (
        parts[0] == "runtime" and len(parts) > 1 and parts[1] in HOST_SIDE and module not in JOINT
    )


def test_the_host_side_of_runtime_has_no_tensors() -> None:
    found = [
        f"{module} imports {name}"
        for module, name in edges()
        if on_host_side(module)
        and top(name) in (FOUNDATIONS - {"numpy"} if module.startswith(ARRAYS) else FOUNDATIONS)
    ]
    assert found == []


def test_the_host_side_of_runtime_imports_nothing_of_the_device_side() -> None:
    found = [
        f"{module} imports {name}"
        for module, name in edges()
        if on_host_side(module) and top(name) in PACKAGES and not on_host_side(name)
    ]
    assert [line for line in found if not line.endswith(" imports runtime")] == []


def test_the_device_side_knows_batches_and_messages_and_no_scheduling() -> None:
    found = [
        f"{module} imports {name}"
        for module, name in edges()
        if top(module) == "runtime"
        and module not in JOINT
        and not on_host_side(module)
        and on_host_side(name)
        and name not in FOR_DEVICE_SIDE
    ]
    assert found == []
    assert [e for e in edges() if e[1] in JOINT] == [], "the main module of a process is imported"


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks"])
def test_a_folder_has_few_modules(package: str) -> None:
    count: dict[str, int] = {}
    for path in source_files(package):
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            count[folder] = count.get(folder, 0) + 1
    large = {at: n for at, n in count.items() if n > MAX_MODULES}
    assert large == {}


def test_attention_knows_tensors_only() -> None:
    allowed = {"torch", "triton", "numpy", "attention"} | set(sys.stdlib_module_names)
    assert [e for e in edges() if top(e[0]) == "attention" and top(e[1]) not in allowed] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_itself_in_a_ring(package: str) -> None:
    graph = {name: imports_of(path) for name, path in MODULES.items() if top(name) == package}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for name in sorted(graph[module] & graph.keys()):
            walk(name, (*path, module))
        done.add(module)

    for module in sorted(graph):
        walk(module, ())


@pytest.mark.parametrize(
    "modules",
    [
        "server.app, server.cli.main, server.process.launcher, server.process.api_process",
        "server.cli.commands.bench",
        ", ".join(sorted(filter(on_host_side, MODULES))),
        "runtime.engine.process",
        "model_zoo.config, model_zoo.quantization.config",
    ],
)
def test_torch_is_not_loaded_by(modules: str) -> None:
    heavy = "{'torch', 'triton', 'transformers'}"
    code = f"import sys, {modules}; found = {heavy} & sys.modules.keys(); assert not found, found"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_an_engine_can_start_where_there_is_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; "
    code += "import runtime.startup.loading, runtime.engine.loop"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def called_name(node: ast.Call) -> str:
    """`torch.load` of `torch.load(path)`; empty for calls of anything but a dotted name."""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def test_nothing_runs_code_that_it_reads() -> None:
    found = []
    for module, path in MODULES.items():
        runners = {n for n in imports_of(path) if top(n) in CODE_RUNNERS}
        # An engine and its own child, through a pipe that only they have.
        if module in ("runtime.precompile.pool", "runtime.precompile.worker"):
            runners -= {"pickle"}
        found += [f"{module} imports {n}" for n in sorted(runners)]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and called_name(node) in {"eval", "exec", "torch.load"}:
                found.append(f"{module}:{node.lineno} calls {called_name(node)}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append(f"{module}:{node.value.lineno} passes trust_remote_code")
    assert found == []


def test_tests_are_no_packages() -> None:
    # One in tests/attention would make pytest import that folder as `attention`.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_wheel_ships_the_four_packages_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel) == {"packages", "exclude"}
    assert wheel["exclude"] == ["model_zoo/tiny_chat/training"], "what made the model stays here"
    assert sorted(wheel["packages"]) == sorted(PACKAGES)


def test_a_model_is_loaded_on_a_cpu_without_the_compiler_of_pytorch() -> None:
    """An operation on "meta" tensors that PyTorch decomposes imports it, which takes 1.5 s."""
    code = (
        "import sys; from runtime.config import EngineConfig; "
        "from runtime.startup.loading import load; "
        "load(EngineConfig(model='model_zoo/tiny_chat', device='cpu'), lambda *progress: None); "
        "found = {'torch._dynamo', 'transformers'} & sys.modules.keys(); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
