"""Who may import whom. Stages exchange records; a stage imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "coordexp"

LAYERS: dict[str, int] = {
    name: number
    for number, names in {
        0: "records errors",  # of layer 1, and what the rest of it may use
        1: "extras distributed cpu_wheels assets",
        2: "config geometry coords",
        3: "data rollouts parsing matching targets packing",
        4: "modeling objective metrics",
        5: "evaluation",
        6: "training serving viewer",
        7: "demo",
        8: "cli",
        9: "__main__",
    }.items()
    for name in names.split()
}

# serving/plugin runs inside somebody else's process: it may use what is made for engine processes.
PLUGIN_MAY_IMPORT = ("coordexp.rollouts.repeat_guard", "coordexp.rollouts.engine.")

HEAVY = ("torch", "transformers", "vllm", "torchvision", "accelerate", "peft", "swift")
TORCH_FREE = [
    *("records", "errors", "extras", "distributed", "cpu_wheels"),
    *("config", "geometry", "coords", "parsing", "matching", "packing"),
    *("rollouts.chunking", "rollouts.seeds", "rollouts.backend", "rollouts.repeat_guard"),
    *("rollouts.engine.guard_activation", "rollouts.engine.lifetime"),
]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent == SOURCE and path.stem == "__init__":
            continue  # the package's own page: checked to import nothing below
        yield path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."), path


def imports(path: Path) -> Iterator[str]:
    """Dotted names of this project that a file imports, wherever in the file."""
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
    """What module ``name`` (below coordexp) imports although its layer forbids it."""
    if name.startswith("serving.plugin"):
        return [target for target in imported if not target.startswith(PLUGIN_MAY_IMPORT)]
    own = name.split(".")[0]
    found = []
    for target in imported:
        other = target.split(".")[1] if "." in target else ""
        if other in ("", "__version__", own):
            continue
        assert other in LAYERS, f"{name} imports {target}, which has no layer; give it one in {Path(__file__).name}"
        if LAYERS[other] >= LAYERS[own]:
            found.append(target)
    return found


@pytest.mark.parametrize(("name", "path"), [pytest.param(n, p, id=n) for n, p in modules()])
def test_module_imports_only_from_lower_layers(name: str, path: Path) -> None:
    assert name.split(".")[0] in LAYERS, f"{name} has no layer; give it one in {Path(__file__).name}"
    assert violations(name, list(imports(path))) == []


def test_the_package_itself_imports_none_of_its_parts() -> None:
    assert list(imports(SOURCE / "__init__.py")) == []


@pytest.mark.parametrize(
    ("name", "imported", "forbidden"),
    [
        ("matching.assign", ["coordexp.records", "coordexp.geometry"], []),
        ("matching.assign", ["coordexp.parsing"], ["coordexp.parsing"]),
        ("config.root", ["coordexp.coords"], ["coordexp.coords"]),
        ("data.jsonl", ["coordexp.data.images", "coordexp.training.window"], ["coordexp.training.window"]),
        ("serving.plugin.x", ["coordexp.rollouts.repeat_guard", "coordexp.errors"], ["coordexp.errors"]),
        ("serving.plugin.x", ["coordexp.vllm_engine.worker", "coordexp.rollouts.hf"], ["coordexp.rollouts.hf"]),
        ("cli", ["coordexp.training", "coordexp.__version__"], []),
    ],
)
def test_the_rule_itself(name: str, imported: list[str], forbidden: list[str]) -> None:
    assert violations(name, imported) == forbidden


def exists(module: str) -> bool:
    path = SOURCE / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("module", [module for module in TORCH_FREE if exists(module)])
def test_imports_with_heavy_packages_blocked(module: str) -> None:
    code = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
import coordexp.{module}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
