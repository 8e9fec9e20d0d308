"""What an error says: a validator's findings in our words, and a suggestion only where it is likely right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

_SURE_OF_TWO = 8  # letters from which two slips still leave one word that can be meant
_MANY_KEYS = 12

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
    "string_too_short": "text of at least {min_length} {characters}",
    "too_short": "a list of at least {min_length} {items}",
    "too_long": "a list of at most {max_length} {items}",
}


def expected(detail: ErrorDetails) -> str:
    """What should have stood there, without what did."""
    kind, figures = detail["type"], dict(detail.get("ctx", {}))
    if kind == "is_instance_of" and figures.get("class") == "Path":
        kind = "path_type"
    if kind == "literal_error":
        return {"True": "true", "False": "false"}.get(text := str(figures["expected"]), text)
    if kind not in _EXPECTED:
        return detail["msg"].removeprefix("Input should be ")
    count = figures.get("min_length", figures.get("max_length"))
    figures |= {"items": "item" if count == 1 else "items", "characters": "character" if count == 1 else "characters"}
    return _EXPECTED[kind].format(**figures)


def shown(value: object) -> str:
    """What stands there, short."""
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


def type_hint(kind: str, value: object) -> str:
    """What to write instead of ``value``, where that is clear; it begins with a colon."""
    if isinstance(value, str):
        if kind in ("int_type", "float_type"):
            return ": this is text; write the number without quotes" if _is_number(value) else ""
        if kind == "bool_type":
            return ": write true or false, without quotes"
        if kind in ("tuple_type", "list_type"):
            return f": write a list, [{value}]"
    if kind == "string_type" and value is not None and not isinstance(value, Mapping | list | tuple):
        return ": put it in quotes to make it text"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if kind in ("model_type", "model_attributes_type", "dict_type") and value is None:
        return ": an empty section; fill it or remove it"
    return ""


def nearest(key: str, valid: Sequence[str]) -> str | None:
    """The valid key that ``key`` was surely meant to be: one slip away (two, in a long word), or its only extension.

    A likeness alone is no reason: ``save_safetensors`` is not ``save_steps``.
    """
    allowed = 2 if len(key) >= _SURE_OF_TWO else 1
    distances = sorted((_slips(key.lower(), other.lower()), other) for other in valid)
    if distances and distances[0][0] <= allowed:
        return distances[0][1]
    words = set(key.split("_"))
    longer = [other for other in valid if len(words) > 1 and words <= set(other.split("_"))]
    return longer[0] if len(longer) == 1 else None


def unknown_key(valid: Sequence[str], guess: str | None, elsewhere: Sequence[str], groups: Mapping[str, str]) -> str:
    """What to say of a key that is none of ``valid``.

    Args:
        guess: the key that was surely meant. elsewhere: dotted keys of other sections with the same name.
        groups: what a kind of keys is about -> these keys, separated by blanks; for sections of many keys.
    """
    if guess is not None:
        return f"unknown key; did you mean '{guess}'?"
    if elsewhere:
        return f"unknown key here; write {' or '.join(elsewhere)}"
    if not valid:
        return "unknown key; this section takes no keys"
    if groups and len(valid) > _MANY_KEYS:
        return "unknown key; valid here: " + "; ".join(f"{about}: {_listed(keys)}" for about, keys in groups.items())
    return f"unknown key; valid here: {', '.join(valid)}"


def _listed(keys: str) -> str:
    return ", ".join(keys.split())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _slips(a: str, b: str) -> int:
    """How many letters were left out, added, replaced, or swapped with their neighbour (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
