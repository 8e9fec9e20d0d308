"""Every public name says what it is; a module's first line too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def test_every_public_name_has_a_docstring() -> None:
    silent = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        silent += [f"{path.relative_to(SOURCE)}: {name}" for name, node in [("", tree), *public(tree, "")]
                   if ast.get_docstring(node) is None and not is_another(node)]  # fmt: skip
    assert silent == []


def public(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or child.name.startswith("_"):
            continue
        yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from public(child, f"{prefix}{child.name}.")


def is_another(node: ast.AST) -> bool:
    """One signature of a function whose last definition has the docstring, or the setter of a property that has it."""
    decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
    return any(one == "overload" or one.endswith(".setter") for one in decorators)
