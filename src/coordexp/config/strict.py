"""Strict models, and pydantic's findings turned into dotted paths, expectations and hints.

A *path* is a tuple of keys and list indices, ``("rollout_matching", "pipeline", "objective", 0, "config")``;
:func:`dotted` writes it as ``rollout_matching.pipeline.objective[0].config``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, ValidationError
from pydantic_core import ErrorDetails

from coordexp.config.wording import expected, nearest, shown, type_hint, unknown_key

KeyPath = tuple[str | int, ...]
_FEW_PLACES = 3  # of a key that stands in more sections than these, nobody can say which was meant
T = TypeVar("T")


class StrictModel(BaseModel):
    """A section: every key declared, no coercion of types (an integer may stand for a float), immutable.

    A section of many keys says in ``KEY_GROUPS`` what they are about, for the message on an unknown one: topic -> keys,
    separated by blanks.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


def default_of(section: type[StrictModel], key: str) -> Any:
    """What ``key`` of ``section`` is where nobody writes it: for the parts that may be called outside of a run, so that
    a default stands in one place. A key without a default is a mistake of the caller's."""
    field = section.model_fields[key]
    assert not field.is_required(), f"{section.__name__}.{key} has no default"
    return field.get_default(call_default_factory=True)


# A YAML list becomes a tuple; its elements stay strict.
ListOf = Annotated[tuple[T, ...], Strict(False)]


def _path_from_text(value: object) -> object:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path cannot hold the character NUL")
    return Path(value) if isinstance(value, str) and value.strip() else value


# A path as text; relative paths are taken from the working directory of the run.
FilePath = Annotated[Path, BeforeValidator(_path_from_text)]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration. ``reads`` are further paths that the finding rests on."""

    path: KeyPath
    message: str
    reads: tuple[KeyPath, ...] = ()


def dotted(path: KeyPath) -> str:
    """``("servers", 0, "base_url")`` -> ``servers[0].base_url``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_dotted(text: str) -> KeyPath:
    """The inverse of :func:`dotted` for paths whose keys hold neither dots nor brackets."""
    parts: list[str | int] = []
    for piece in text.split("."):
        key, *indices = piece.replace("]", "").split("[")
        parts += [key, *(int(index) for index in indices)]
    return tuple(parts)


def problem(path: str, message: str, *reads: str) -> Problem:
    """A :class:`Problem` whose paths are written with dots."""
    return Problem(parse_dotted(path), message, tuple(parse_dotted(read) for read in reads))


def problems_from(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """Every finding of a validation of ``model``, in the order of the schema."""
    details = [(detail, *_resolve(model, detail["loc"])) for detail in error.errors(include_url=False)]
    misspelt = {
        (*path[:-1], nearest(str(path[-1]), list(owner.model_fields)))
        for detail, path, owner, _ in details
        if detail["type"] == "extra_forbidden" and owner is not None
    }
    for detail, path, owner, description in details:
        if detail["type"] == "missing" and path in misspelt:
            continue  # one mistake: the unknown key's own finding asks whether this one was meant
        # pydantic counts valid items alone, so a list of wrong ones is also "too short" to it.
        below = any(len(other) > len(path) and other[: len(path)] == path for _, other, _, _ in details)
        if not (detail["type"] == "too_short" and below):
            yield _from_detail(detail, path, owner, description, model)


def _from_detail(
    detail: ErrorDetails, path: KeyPath, owner: type[BaseModel] | None, description: str, model: type[BaseModel]
) -> Problem:
    kind, value = detail["type"], detail["input"]
    about = f" ({description})" if description else ""
    if kind == "extra_forbidden" and owner is not None:
        return Problem(path, _unknown_key(path, owner, model))
    if kind == "missing":
        return Problem(path, f"missing; this key is required{about}")
    if kind == "invalid_key":
        return Problem(path[:-1] if path and path[-1] == "[key]" else path, "keys must be text; quote this key")
    if kind == "union_tag_not_found":
        return (
            Problem((*path, "name"), "missing; every module names itself")
            if isinstance(value, Mapping)
            else (Problem(path, f"expected a mapping with a name, got {shown(value)}"))
        )
    if kind == "union_tag_invalid":
        context = detail.get("ctx", {})
        tags = [tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(",")]
        tag = str(context.get("tag", ""))
        guess = nearest(tag, tags)
        hint = f"; did you mean '{guess}'?" if guess else ""
        return Problem((*path, "name"), f"unknown module '{tag}'{hint}; expected one of {', '.join(tags)}")
    if kind == "value_error":
        return Problem(path, f"{detail.get('ctx', {}).get('error', detail['msg'])}{about}")
    return Problem(path, f"expected {expected(detail)}, got {shown(value)}{type_hint(kind, value)}{about}")


def _unknown_key(path: KeyPath, owner: type[BaseModel], root: type[BaseModel]) -> str:
    key, valid = str(path[-1]), list(owner.model_fields)
    # debug repeats keys of other sections for its one switch.
    elsewhere = [dotted(place) for place in _places_of(key, root, ()) if place != path and place[0] != "debug"]
    groups = getattr(owner, "KEY_GROUPS", {})
    return unknown_key(valid, nearest(key, valid), elsewhere if len(elsewhere) <= _FEW_PLACES else (), groups)


def _places_of(key: str, section: type[BaseModel], path: KeyPath) -> Iterator[KeyPath]:
    """Where in ``section`` a key of this name is declared; entries of lists are not looked into."""
    for name, field in section.model_fields.items():
        if name == key:
            yield (*path, name)
        for option in _options(field.annotation):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _places_of(key, option, (*path, name))


def _resolve(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[KeyPath, type[BaseModel] | None, str]:
    """pydantic's location -> (path as the user wrote it, the model that owns the last key, that key's description).

    pydantic puts the tags of unions between keys; a walk along the schema tells them from keys, where a look at the
    data could not.
    """
    path: list[str | int] = []
    here: Any = model
    owner: type[BaseModel] | None = None
    description = ""
    for part in loc:
        options = _options(here)
        section = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        tagged = {tag: o for o in options for tag in _tags_of(o)}
        if len(tagged) > 1:  # a tagged union: this part is the tag, not a key
            here = tagged.get(str(part), Any)
            continue
        path.append(part)
        owner = section
        field = section.model_fields.get(str(part)) if section is not None else None
        description = field.description or "" if field is not None else ""
        if field is not None:
            here = field.annotation
        else:
            item = next((get_args(o) for o in options if get_origin(o) is tuple), ())
            here = item[0] if item else Any
    return tuple(path), owner, description


def _options(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without Annotated wrappers."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in _options(member)]
    return [annotation]


def _tags_of(option: Any) -> tuple[str, ...]:
    if isinstance(option, type) and issubclass(option, BaseModel) and "name" in option.model_fields:
        annotation = option.model_fields["name"].annotation
        if get_origin(annotation) is Literal:
            return tuple(str(tag) for tag in get_args(annotation))
    return ()
