"""Which configuration keys a program reads: a small type inference over its source.

Attribute names alone prove nothing (``enabled`` is a key of ten sections), so the types of expressions are followed:
from annotations of parameters, fields and results, through assignments, loops and calls. It errs towards "not read".
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

Types = frozenset[str]  # names of classes; a list of X counts as X
NOTHING: Types = frozenset()
_COPIES = {
    "model_copy",
    "items",
    "values",
    "enumerate",
    "sorted",
    "list",
    "tuple",
    "next",
    "reversed",
    "replace",
    "zip",
}


def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every section below ``root``, by class name."""
    found: dict[str, type[BaseModel]] = {}

    def add(model: type[BaseModel]) -> None:
        if model.__name__ not in found:
            found[model.__name__] = model
            for field in model.model_fields.values():
                for inner in models_of(field.annotation):
                    add(inner)

    add(root)
    return found


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]


class Reads:
    """Reads of section fields in a set of source files; ``found`` holds (class name, field) pairs."""

    def __init__(self, known: dict[str, type[BaseModel]], files: Iterable[Path]) -> None:
        self.sections = known
        self.aliases = {
            name: frozenset(model.__name__ for model in models_of(value))
            for section in known.values()
            for name, value in vars(importlib.import_module(section.__module__)).items()
            if not isinstance(value, type) and models_of(value)
        }
        self.trees = [ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in files]
        self.found: set[tuple[str, str]] = set()
        self.classes: dict[str, dict[str, Types]] = defaultdict(dict)  # class → attribute or method → types
        self.functions: dict[str, Types] = defaultdict(lambda: NOTHING)
        for tree in self.trees:
            self._names(tree)
        for tree in self.trees:
            self._declarations(tree)
        for _ in range(3):  # attributes set in one method are read in another, perhaps of another file
            for tree in self.trees:
                _Scope(self, {}, None).block(tree.body)

    def _names(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = {}

    def _declarations(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] |= self.annotated(node.returns)
            elif isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        self.classes[node.name][item.target.id] = self.annotated(item.annotation)
                    elif isinstance(item, ast.FunctionDef):
                        self.classes[node.name][item.name] = self.annotated(item.returns)

    def annotated(self, annotation: ast.expr | None) -> Types:
        if annotation is None:
            return NOTHING
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}
        direct = names & (set(self.sections) | set(self.classes))
        return frozenset(direct).union(*(self.aliases[name] for name in names & set(self.aliases)))

    def attribute(self, owner: Types, name: str) -> Types:
        """Note the read of ``name``; what it gives."""
        found: set[str] = set()
        for cls in owner:
            if cls in self.sections:
                found |= self._section_attribute(self.sections[cls], name)
            else:
                found |= self.classes.get(cls, {}).get(name, NOTHING)
        return frozenset(found)

    def _section_attribute(self, section: type[BaseModel], name: str) -> set[str]:
        if name in section.model_fields:
            self.found.add((section.__name__, name))
            return {model.__name__ for model in models_of(section.model_fields[name].annotation)}
        if name in ("model_dump", "model_dump_json"):
            self.whole(section, set())
        elif callable(getattr(section, name, None)) and not hasattr(BaseModel, name):
            self._method(section, name)
        return set()

    def whole(self, section: type[BaseModel], but: set[str]) -> None:
        """All of a section is read at once."""
        for name, field in section.model_fields.items():
            if name not in but:
                self.found.add((section.__name__, name))
                for inner in models_of(field.annotation):
                    self.whole(inner, set())

    def _method(self, section: type[BaseModel], name: str) -> None:
        """A method of the section reads some of its fields for the caller."""
        module = importlib.import_module(section.__module__)
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        bodies = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == section.__name__]
        for method in (m for body in bodies for m in body.body if isinstance(m, ast.FunctionDef) and m.name == name):
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    if node.attr in section.model_fields:
                        self.found.add((section.__name__, node.attr))
                    elif node.attr != "model_dump" and node.attr != name:
                        self._section_attribute(section, node.attr)
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "model_dump":
                    excluded = [
                        k.value.id for k in node.keywords if k.arg == "exclude" and isinstance(k.value, ast.Name)
                    ]
                    self.whole(section, set(getattr(module, excluded[0])) if excluded else set())


class _Scope:
    """Types of the names in one function (or module), whatever the order of its statements."""

    def __init__(self, reads: Reads, outer: dict[str, Types], cls: str | None) -> None:
        self.reads = reads
        self.names = dict(outer)
        self.cls = cls

    def block(self, body: list[ast.stmt]) -> None:
        for _ in range(2):
            for statement in body:
                self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = _Scope(self.reads, self.names, self.cls)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                inner.names[argument.arg] = self.reads.annotated(argument.annotation)
            if self.cls is not None and arguments and arguments[0].arg == "self":
                inner.names["self"] = frozenset({self.cls})
            inner.block(node.body)
        elif isinstance(node, ast.ClassDef):
            _Scope(self.reads, self.names, node.name).block(node.body)
        elif isinstance(node, ast.Assign):
            given = self.expression(node.value)
            for target in node.targets:
                self.assign(target, node.value, given)
        elif isinstance(node, ast.AnnAssign):
            given = self.reads.annotated(node.annotation)
            if node.value is not None:
                given |= self.expression(node.value)
            self.bind(node.target, given)
        elif isinstance(node, ast.For):
            self.bind(node.target, self.expression(node.iter))
            self.children(node.body + node.orelse)
        elif isinstance(node, ast.With):
            for item in node.items:
                given = self.expression(item.context_expr)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, given)
            self.children(node.body)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self.statement(child)
                elif isinstance(child, ast.expr):
                    self.expression(child)
                else:
                    self.children([s for s in ast.walk(child) if isinstance(s, ast.stmt)])

    def children(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def assign(self, target: ast.expr, value: ast.expr, given: Types) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, source in zip(target.elts, value.elts, strict=True):
                self.bind(one, self.expression(source))
        else:
            self.bind(target, given)

    def bind(self, target: ast.expr, given: Types) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id, NOTHING) | given
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, given)
        elif self.cls is not None and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            known = self.reads.classes[self.cls]
            known[target.attr] = known.get(target.attr, NOTHING) | given

    def expression(self, node: ast.expr) -> Types:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return self.reads.attribute(self.expression(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self.comprehension(node)
        parts = [self.expression(child) for child in _expressions(node)]
        carries = isinstance(node, ast.BoolOp | ast.IfExp | ast.Tuple | ast.List | ast.Subscript | ast.NamedExpr)
        if isinstance(node, ast.NamedExpr):
            self.bind(node.target, self.expression(node.value))
        return frozenset().union(*parts) if carries and parts else NOTHING

    def call(self, node: ast.Call) -> Types:
        given = [self.expression(a) for a in [*node.args, *(k.value for k in node.keywords)]]
        if isinstance(node.func, ast.Attribute):
            owner = self.expression(node.func.value)
            result = self.reads.attribute(owner, node.func.attr)
            return result | (owner if node.func.attr in _COPIES else NOTHING) | self.reads.functions[node.func.attr]
        if not isinstance(node.func, ast.Name):
            self.expression(node.func)
            return NOTHING
        name = node.func.id
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self.reads.attribute(given[0], str(node.args[1].value))
        if name in self.reads.sections or name in self.reads.classes:
            return frozenset({name})
        passed = frozenset().union(*given) if name in _COPIES and given else NOTHING
        return self.reads.functions[name] | passed

    def comprehension(self, node: Any) -> Types:
        inner = _Scope(self.reads, self.names, self.cls)
        for generator in node.generators:
            inner.bind(generator.target, inner.expression(generator.iter))
            for condition in generator.ifs:
                inner.expression(condition)
        if isinstance(node, ast.DictComp):
            return inner.expression(node.key) | inner.expression(node.value)
        return inner.expression(node.elt)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions directly below a node, through helpers such as f-string parts and keyword arguments."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        else:
            yield from _expressions(child)
