"""The base of all sections, and pydantic's findings as problems: a dotted path, and what to write instead.

A *path* is a tuple of keys and list indices, ``("rollout_matching", "pipeline", "objective", 0, "config")``;
:func:`dotted` writes it as ``rollout_matching.pipeline.objective[0].config``.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError
from pydantic_core import ErrorDetails

from coordexp.home import below_home

KeyPath = tuple[str | int, ...]
T = TypeVar("T")


class StrictModel(BaseModel):
    """A section: every key declared, immutable, no coercion of types (except an integer given for a float).

    The text under a field is its description.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, field in cls.model_fields.items():
            inherited = getattr(cls.__base__, "model_fields", {}).get(name)
            text = field.description or (inherited.description if inherited else None) or ""
            field.description = " ".join(text.split())  # without the line breaks of the source


Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # timers count nanoseconds in 64 bits
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
# A YAML list becomes a tuple; its elements stay strict.
ListOf = Annotated[tuple[T, ...], Strict(False)]


def _path_from_text(value: object) -> object:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path cannot hold the character NUL")
    return Path(below_home(value)) if isinstance(value, str) and value.strip() else value


# A path as text; relative paths start at the working directory, and ~ is the home folder.
FilePath = Annotated[Path, BeforeValidator(_path_from_text)]


def default_of(section: type[StrictModel], key: str) -> Any:
    """Default of ``section.key``, for code that runs without a configuration. The key must have one."""
    field = section.model_fields[key]
    assert not field.is_required(), f"{section.__name__}.{key} has no default"
    return field.get_default(call_default_factory=True)


class Problem(NamedTuple):
    """One thing that is wrong with a configuration. ``meant``: the key that an unknown one probably misspells."""

    path: KeyPath
    message: str
    meant: KeyPath | None = None


def dotted(path: KeyPath) -> str:
    """``("servers", 0, "base_url")`` -> ``servers[0].base_url``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_dotted(text: str) -> KeyPath:
    """The inverse of :func:`dotted` for paths whose keys contain neither dots nor brackets."""
    parts: list[str | int] = []
    for piece in text.split("."):
        key, *indices = piece.replace("]", "").split("[")
        parts += [key, *(int(index) for index in indices)]
    return tuple(parts)


def section_of(annotation: Any) -> type[StrictModel] | None:
    """The section that a field of this type holds; None for a value or a list."""
    return next((o for o in _options(annotation) if isinstance(o, type) and issubclass(o, StrictModel)), None)


def problems_from(error: ValidationError, model: type[StrictModel]) -> Iterator[Problem]:
    """Every finding of a validation of ``model``, in the order of the schema."""
    found = [(detail, *_resolve(model, detail["loc"])) for detail in error.errors(include_url=False)]
    unknown = [(path, owner) for detail, path, owner, _ in found if detail["type"] == "extra_forbidden" and owner]
    meant = {(*path[:-1], nearest(str(path[-1]), list(owner.model_fields))) for path, owner in unknown}
    expected: dict[KeyPath, list[str]] = {}  # pydantic reports each alternative of a value's union
    for detail, path, _, _ in found:
        expected.setdefault(path, []).append(_expected(detail))
    for detail, path, owner, description in found:
        if path not in expected or (detail["type"] == "missing" and path in meant):
            continue  # one mistake: the message on the misspelt key names this one
        # pydantic counts valid items alone, so it also calls a list of invalid items "too short".
        below = any(len(other) > len(path) and other[: len(path)] == path for _, other, _, _ in found)
        if not (detail["type"] == "too_short" and below):
            yield _from_detail(detail, path, owner, description, model, " or ".join(expected.pop(path)))


def _from_detail(
    detail: ErrorDetails,
    path: KeyPath,
    owner: type[StrictModel] | None,
    description: str,
    model: type[StrictModel],
    expected: str,
) -> Problem:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    about = f" ({description})" if description else ""
    if kind == "extra_forbidden" and owner is not None:
        key, valid = str(path[-1]), list(owner.model_fields)
        if guess := nearest(key, valid):
            return Problem(path, f"unknown key; did you mean '{guess}'?", (*path[:-1], guess))
        elsewhere = [dotted(place) for place in key_paths(model) if place[-1] == key and place != path]
        if 0 < len(elsewhere) <= 3:  # with more places, any guess is arbitrary
            return Problem(path, f"unknown key here; write {' or '.join(elsewhere)}")
        return Problem(
            path, f"unknown key; valid here: {', '.join(valid)}" if valid else "unknown key; this section takes no keys"
        )
    if kind == "missing":
        return Problem(path, f"missing; this key is required{about}")
    if kind == "invalid_key":
        return Problem(path[:-1] if path and path[-1] == "[key]" else path, "keys must be text; quote this key")
    if kind == "union_tag_not_found":
        if isinstance(value, Mapping):
            return Problem((*path, "name"), "missing; every module needs its name")
        return Problem(path, f"expected a mapping with a name, got {_shown(value)}")
    if kind == "union_tag_invalid":
        tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
        guess = nearest(str(context["tag"]), tags)
        hint = f"; did you mean '{guess}'?" if guess else ""
        text = f"unknown module '{context['tag']}'{hint}; expected one of {', '.join(tags)}"
        return Problem((*path, "name"), text)
    if kind == "value_error":
        return Problem(path, f"{context.get('error', detail['msg'])}{about}")
    return Problem(path, f"expected {expected}, got {_shown(value)}{about}")


def key_paths(section: type[StrictModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every key below ``section``, sections included, entries of lists left out."""
    for name, field in section.model_fields.items():
        yield (*path, name)
        if inner := section_of(field.annotation):
            yield from key_paths(inner, (*path, name))


def nearest(key: str, valid: Sequence[str]) -> str | None:
    """The valid key that ``key`` probably misspells."""
    close = difflib.get_close_matches(key.lower(), valid, n=1, cutoff=0.8)
    return close[0] if close else None


def _resolve(model: type[StrictModel], loc: tuple[str | int, ...]) -> tuple[KeyPath, type[StrictModel] | None, str]:
    """pydantic's location -> (path as the user wrote it, section that owns the last key, that key's description).

    pydantic puts the tags of unions between keys; the schema decides which is which.
    """
    path: list[str | int] = []
    here: Any = model
    owner: type[StrictModel] | None = None
    description = ""
    for part in loc:
        options = _options(here)
        tagged = {tag: option for option in options for tag in _tags_of(option)}
        if len(tagged) > 1:
            here = tagged.get(str(part), Any)
            continue
        if len(options) > 1 and all(get_origin(o) is Literal or o in (int, float, bool, str) for o in options):
            break  # the tag of a value's union
        path.append(part)
        owner = section_of(here)
        field = owner.model_fields.get(str(part)) if owner is not None else None
        description = field.description or "" if field is not None else ""
        items = next((get_args(option) for option in options if get_origin(option) is tuple), (Any,))
        here = field.annotation if field is not None else items[0]
    return tuple(path), owner, description


def _options(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in _options(member)]
    return [annotation]


def _tags_of(option: Any) -> tuple[str, ...]:
    if isinstance(option, type) and issubclass(option, StrictModel) and "name" in option.model_fields:
        annotation = option.model_fields["name"].annotation
        if get_origin(annotation) is Literal:
            return tuple(str(tag) for tag in get_args(annotation))
    return ()


# By pydantic's kind of finding; ``{…}`` are the finding's own figures. Any other kind keeps pydantic's sentence.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path as text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "a number greater than or equal to {ge}",
    "less_than": "a number less than {lt}",
    "less_than_equal": "a number less than or equal to {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text of at least {min_length} {characters}",
    "too_short": "a list of at least {min_length} {items}",
    "too_long": "a list of at most {max_length} {items}",
}


def _expected(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {}).items()
    figures = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context}
    if kind == "is_instance_of" and figures.get("class") == "Path":
        kind = "path_type"
    if kind == "literal_error":
        return {"True": "true", "False": "false"}.get(text := str(figures["expected"]), text)
    if kind not in _EXPECTED:
        return detail["msg"].removeprefix("Input should be ")
    plural = "" if figures.get("min_length", figures.get("max_length")) == 1 else "s"
    return _EXPECTED[kind].format(**figures, items=f"item{plural}", characters=f"character{plural}")


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
