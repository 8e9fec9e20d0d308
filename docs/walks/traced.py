"""Notes which files of coordexp handle a marked value, in each process of a run; ``sitecustomize`` starts it.

A file handles a value if one of its functions has it among its arguments, its results or its local variables at the
end, by itself or within three levels of lists, tuples, dicts and dataclasses. A file whose code names a key
counts for that key too.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

SOURCE = f"{os.sep}src{os.sep}coordexp{os.sep}"
KEY, KEY_VALUE = "decode_batch_size", 100_003
# Exact in float32, and larger than probabilities: of thousands, one was equal to a smaller value.
LOSS_KEY, STRUCT_CE_WEIGHT = "struct_ce_weight", 37.8125 + 2**-17
IMAGE = "marked.png"
COLOUR = (173, 91, 37)
_PIXELS = (bytes(COLOUR) * 8, *(bytes([value]) * 64 for value in COLOUR))  # pixel by pixel; channel by channel
_TENSOR = re.compile(r"layers\.0\.mlp\.down_proj\.weight$")
_MOST_ITEMS, _MOST_NUMBERS, _LEVELS = 512, 1 << 20, 3


class Walks:
    """The values of each walk, and where they were found: ``(walk, file, function)``, each once."""

    def __init__(self, folder: Path) -> None:
        self._lines = (folder / f"{os.getpid()}.tsv").open("a", buffering=1, encoding="utf-8")
        self._seen: set[tuple[str, str, str]] = set()
        self._files: dict[CodeType, str] = {}  # "" for code of other projects
        self._tokens: list[int] | None = None  # of the first answer, from its middle
        self.trains = "train" in sys.orig_argv
        self._pushing = not self.trains  # servers and their workers see weights only in pushes
        self._reading = not self.trains  # an image's way begins where a step reads its sample

    def on_call(self, frame: Any, *_: Any) -> Any:
        """For :func:`sys.settrace`: notes the values of a call of this project, and watches its end."""
        code = frame.f_code
        if (file := self._files.get(code)) is None:
            file = self._files[code] = code.co_filename.partition(SOURCE)[2]
        if not file:
            return None
        frame.f_trace_lines = False
        self._look(frame, file, "call", None)
        return self._on_end

    def _on_end(self, frame: Any, event: str, result: Any) -> Any:
        if event == "return":
            self._look(frame, self._files[frame.f_code], event, result)
        return self._on_end

    def _look(self, frame: Any, file: str, event: str, result: Any) -> None:
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)
        if self.trains:
            for walk, key in (("key", KEY), ("loss", LOSS_KEY)):
                if key in code.co_names or key in code.co_varnames or key in code.co_consts:
                    self._note(walk, file, function)
        # A comprehension's values are its function's.
        if code.co_name in ("<module>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"):
            return
        if function.endswith("sync_weights"):
            self._pushing = event == "call"
        self._reading |= function == "RecordDataset.__getitem__"
        if function == "ServerClient.infer" and self._tokens is None and event == "return":
            self._tokens = _middle_of_an_answer(result)
            if self._tokens is not None:
                self._note("token", file, function)  # the reply has it deeper than three levels
        looked_for = {walk: matches for walk, matches in self._looked_for() if (walk, file, function) not in self._seen}
        if not looked_for:
            return
        values = [value for name, value in frame.f_locals.items() if name != "self"]
        values += [result] if event == "return" else []
        for walk, matches in looked_for.items():
            if any(holds(value, matches, 0 if walk == "key" else _LEVELS) for value in values):
                self._note(walk, file, function)

    def _looked_for(self) -> Iterator[tuple[str, Callable[[Any], bool]]]:
        if self._reading:
            yield "image" if self.trains else "served image", _is_image
        if self.trains:
            yield "loss", _is_weight
            yield "key", _is_key_value
        if self._tokens is not None:
            yield "token", self._is_answer
        if self._pushing:
            yield "tensor", _is_name

    def _note(self, walk: str, file: str, function: str) -> None:
        if (walk, file, function) not in self._seen:
            self._seen.add((walk, file, function))
            self._lines.write(f"{walk}\t{file}\t{function}\n")

    def _is_answer(self, value: Any) -> bool:
        wanted = self._tokens
        assert wanted is not None
        if isinstance(value, (list, tuple)):
            starts = [at for at, one in enumerate(value) if type(one) is int and one == wanted[0]]
            numbers = value if starts and all(type(one) is int for one in value) else []
        elif (numbers := _array(value, "iu")) is not None:
            numbers = numbers.ravel()
            starts = (numbers == wanted[0]).nonzero()[0]
        else:
            return False
        return any([*numbers[at : at + len(wanted)]] == wanted for at in starts)


def holds(value: Any, matches: Callable[[Any], bool], levels: int = _LEVELS) -> bool:
    """Whether ``value`` is what is looked for, or a container of it."""
    if matches(value):
        return True
    if levels == 0 or isinstance(value, (str, bytes, int, float, type(None), type)):
        return False
    if type(value) is dict:
        inside = [*list(value)[:_MOST_ITEMS], *list(value.values())[:_MOST_ITEMS]]
    elif type(value) is list or (isinstance(value, tuple) and type(value).__module__ != "importlib.metadata"):
        inside = list(value[:_MOST_ITEMS])
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return False
    return any(holds(one, matches, levels - 1) for one in inside)


def _is_image(value: Any) -> bool:
    if isinstance(value, (str, Path)):
        return str(value).endswith(IMAGE)
    name = type(value).__module__
    if name.startswith("PIL.") and hasattr(value, "getpixel"):
        return value.mode == "RGB" and value.getpixel((0, 0)) == COLOUR
    raw = value if isinstance(value, (bytes, bytearray)) else _bytes(value, "u")
    return raw is not None and any(pattern in raw for pattern in _PIXELS)


def _is_key_value(value: Any) -> bool:
    return type(value) is int and value == KEY_VALUE


def _is_weight(value: Any) -> bool:
    if type(value) is float:
        return value == STRUCT_CE_WEIGHT
    if isinstance(value, (list, tuple)):
        return STRUCT_CE_WEIGHT in value if all(type(one) is float for one in value) else False
    array = _array(value, "f")
    return array is not None and array.dtype.itemsize == 4 and bool((array == STRUCT_CE_WEIGHT).any())


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 200 and _TENSOR.search(value) is not None


def _array(value: Any, kinds: str) -> Any:
    # A small NumPy array of these kinds, also of a tensor; None for anything else.
    name = type(value).__module__
    if name.startswith("torch") and hasattr(value, "detach") and hasattr(value, "numel"):
        if value.numel() > _MOST_NUMBERS or value.device.type != "cpu" or str(value.dtype) == "torch.bfloat16":
            return None
        value = value.detach().numpy()
    elif name != "numpy" or not hasattr(value, "dtype"):
        return None
    return value if value.dtype.kind in kinds and 0 < value.size <= _MOST_NUMBERS else None


def _bytes(value: Any, kinds: str) -> bytes | None:
    array = _array(value, kinds)
    return None if array is None or array.dtype.itemsize != 1 else array.tobytes()


def _middle_of_an_answer(reply: Any) -> list[int] | None:
    found: list[list[int]] = []

    def look(value: Any) -> None:
        if isinstance(value, Mapping):
            ids = value.get("token_ids")
            if isinstance(ids, list) and len(ids) > 24:
                found.append(ids[len(ids) // 2 - 4 : len(ids) // 2 + 4])
            for one in value.values():
                look(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                look(one)

    look(reply)
    return found[0] if found else None


class _AtImport:
    """Starts the trace of the importing thread with the first of these modules: before, a server starts vLLM."""

    def __init__(self, on_call: Any) -> None:
        self._on_call = on_call

    def find_spec(self, name: str, *_: Any) -> None:
        if name in ("coordexp.engine.server.openai", "coordexp.engine.worker.extension"):
            sys.settrace(self._on_call)


def start() -> None:
    """Trace this process if ``COORDEXP_WALKS`` names a folder, which gets one file a process."""
    if (folder := os.environ.get("COORDEXP_WALKS")) and "launch" not in sys.orig_argv:
        walks = Walks(Path(folder))
        threading.settrace(walks.on_call)
        if walks.trains:
            sys.settrace(walks.on_call)
        else:
            sys.meta_path.insert(0, _AtImport(walks.on_call))
