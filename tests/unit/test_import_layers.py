"""Who may import whom. Stages exchange records; a stage imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "coordexp"

# A module's layer is that of its longest dotted name here.
LAYERS: dict[str, int] = {
    name: number
    for number, names in {
        -1: "errors",
        0: "out_of_memory printable",
        1: "records background distributed cpu_wheels transport",
        2: "config geometry coords sharding transfer",
        3: "data parsing matching packing rollouts",
        4: "checkpoints targets weight_sync rollouts.learner",
        5: "modeling metrics",
        6: "objective evaluation",
        7: "engine recording",
        8: "viewer runs",
        9: "training launch",
        10: "inference",
        11: "api doctor",
        12: "cli",
        13: "__main__",
    }.items()
    for name in names.split()
}

# The plugin runs inside ms-swift's processes and must not pull in the trainer's side.
PLUGIN = ("engine.plugin", "engine.swift_rollout")
PLUGIN_MAY_IMPORT = (
    *("coordexp.engine", "coordexp.weight_sync"),
    *("coordexp.rollouts.repeat_guard", "coordexp.rollouts.allowed_labels", "coordexp.errors"),
)

HEAVY = ("torch", "transformers", "vllm", "torchvision", "accelerate", "peft", "swift")
TORCH_FREE = [
    "runs.start",
    *("records", "errors", "out_of_memory", "background", "distributed", "cpu_wheels", "transport", "data.files"),
    *("config", "geometry", "coords", "checkpoints.describe", "cli.init", "parsing", "matching", "packing", "metrics"),
    *("rollouts", "rollouts.chunking", "rollouts.backend", "rollouts.repeat_guard", "rollouts.allowed_labels"),
    *("weight_sync", "engine.arguments", "engine.engine_process", "engine.client", "doctor"),
]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent == SOURCE and path.stem == "__init__":
            continue  # the package's own page: checked to import nothing below
        yield path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            if node.module == "coordexp":
                yield from (f"coordexp.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("coordexp."):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("coordexp"))


def violations(name: str, imported: list[str]) -> list[str]:
    """Imports of module ``name`` (below coordexp) that its layer forbids."""
    if name.startswith(PLUGIN):
        return [target for target in imported if not target.startswith(PLUGIN_MAY_IMPORT)]
    forbidden = []
    for target in imported:
        other = target.removeprefix("coordexp").removeprefix(".")
        if other in ("", "__version__") or other.split(".")[0] == name.split(".")[0]:
            continue
        if layer(other) >= layer(name):
            forbidden.append(target)
    return forbidden


def layer(name: str) -> int:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (number := LAYERS.get(".".join(parts[:length]))) is not None:
            return number
    raise AssertionError(f"{name} has no layer; give it one in {Path(__file__).name}")


def test_modules_import_only_from_lower_layers() -> None:
    found = {name: violations(name, list(imports(path))) for name, path in modules()}
    assert len(found) > 100
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_importing_the_package_imports_no_submodules() -> None:
    assert list(imports(SOURCE / "__init__.py")) == []


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
