"""Who may import whom. Stages exchange records; a stage imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "coordexp"

# A module's layer is that of its longest dotted name here.
LAYERS: dict[str, float] = {
    name: number
    for number, names in {
        -1: "errors",
        0: "addresses heavy_imports home hub out_of_memory printable reading temporary",
        1: "records background distributed cpu_wheels transport",
        2: "config geometry coords sharding transfer",
        3: "data parsing matching packing",
        4: "checkpoints targets weight_sync rollouts",
        5: "modeling metrics",
        6: "objective evaluation",
        7: "engine engine.wire recording",
        7.5: "engine.trainer engine.server engine.worker",
        8: "viewer runs rollouts.__init__",
        9: "training launch",
        10: "inference",
        11: "api doctor",
        12: "cli",
        13: "__main__",
    }.items()
    for name in names.split()
}

# The plugin runs inside ms-swift's processes and must not pull in the trainer's side.
PLUGIN = ("engine.server.plugin", "engine.server.swift_rollout", "engine.server.swift_pipes")
PLUGIN_MAY_IMPORT = (
    *("engine.server.swift_", "engine.wire", "weight_sync"),
    *("rollouts.repeat_guard", "rollouts.class_names", "checkpoints.fingerprints", "errors"),
)
# Folders that run in different processes; code that two of them need is in engine.wire.
ROOMS = ("engine.trainer", "engine.server", "engine.worker")
# Packages whose own file re-exports from layers above its modules.
FRONT_DOORS = ("rollouts.__init__",)

HEAVY = ("torch", "transformers", "vllm", "torchvision", "accelerate", "peft", "swift")
TORCH_FREE = [
    *("runs.start", "checkpoints.fetch", "records", "errors", "reading", "heavy_imports", "out_of_memory", "hub"),
    *("background", "distributed", "cpu_wheels", "transport", "data.files"),
    *("config", "geometry", "coords", "checkpoints.describe", "cli.init", "parsing", "matching", "packing", "metrics"),
    *("rollouts", "rollouts.chunking", "rollouts.backend", "rollouts.repeat_guard", "rollouts.class_names"),
    *("weight_sync", "engine.wire.arguments", "engine.wire.engine_process", "engine.trainer.client", "doctor"),
    *("engine.trainer.backends", "engine.server.options", "engine.server.serving"),
]


def modules() -> dict[str, Path]:
    """Files by dotted name below coordexp; a package's own file is ``package.__init__``."""
    files = sorted(SOURCE.rglob("*.py"))
    return {file.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): file for file in files}


MODULES = modules()


def module_of(target: str) -> str:
    """The module that ``import target`` or ``from package import name`` (``package.name``) reads, below coordexp."""
    name = target.removeprefix("coordexp").removeprefix(".")
    for candidate in (name, f"{name}.__init__".lstrip("."), f"{name.rpartition('.')[0]}.__init__".lstrip(".")):
        if candidate in MODULES:
            return candidate
    return name.rpartition(".")[0]


@cache
def imports(path: Path) -> set[str]:
    """Modules of coordexp that a file imports, also inside functions and for type checkers."""
    targets: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            targets += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
    return {module_of(target) for target in targets if target.split(".")[0] == "coordexp"}


def violations(name: str, imported: Iterable[str]) -> list[str]:
    """Imports of module ``name`` that its layer forbids."""
    if name.startswith(PLUGIN):
        return [target for target in imported if not target.startswith(PLUGIN_MAY_IMPORT)]
    others = [target for target in imported if target != "__init__" and folder(target) != folder(name)]
    return [target for target in others if layer(target) >= layer(name)]


def folder(name: str) -> str:
    """Modules of one folder may import each other: a package or, of ``engine``, a room. A front door is alone."""
    if name in FRONT_DOORS:
        return name
    return next((room for room in ROOMS if name.startswith(f"{room}.")), name.split(".")[0])


def layer(name: str) -> float:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (number := LAYERS.get(".".join(parts[:length]))) is not None:
            return number
    raise AssertionError(f"{name} has no layer; give it one in {Path(__file__).name}")


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """One circle of ``graph``, a module and what it imports, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def test_modules_import_only_from_lower_layers() -> None:
    found = {name: violations(name, imports(path)) for name, path in MODULES.items() if name != "__init__"}
    assert len(found) > 100
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_importing_the_package_imports_no_submodules() -> None:
    assert imports(SOURCE / "__init__.py") == set()


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count: they hide a circle and do not remove it."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "c", "b", "a"]]
    assert circles({name: imports(path) - {name} for name, path in MODULES.items()}) == []


def test_imports_with_heavy_packages_blocked() -> None:
    """All in one process: a module that imports a heavy package is named with it."""
    code = f"""
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
for module in {TORCH_FREE!r}:
    try:
        importlib.import_module("coordexp." + module)
    except ImportError as error:
        print(module, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in SOURCE.rglob("*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
