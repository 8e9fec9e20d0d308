"""Lines on stderr about the start of vLLM's engines, which takes seconds to minutes. Imports no vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.data.files import cache_folder, read_json, write_atomically
from coordexp.data.progress_bar import literal_console
from coordexp.errors import DataError

DURATIONS = "engine_starts.json"  # in the cache folder: seconds of the last start of each kind
_SETTINGS = ("dtype", "tensor_parallel_size", "data_parallel_size", "max_model_len", "enforce_eager", "enable_lora")


@contextmanager
def announced_start(arguments: Mapping[str, Any], *, gpu: bool) -> Iterator[None]:
    """Around a start with these engine arguments, on the first rank: print that it begins, with the duration of the
    last one like it on this machine, and how long it took. Prints no second line after an error."""
    if not distributed.is_main():
        yield
        return
    console, device = literal_console(stderr=True), "GPU" if gpu else "CPU"
    kind = json.dumps([str(arguments["model"]), device, *(arguments.get(name) for name in _SETTINGS)])
    file = cache_folder() / DURATIONS
    last = _durations(file).get(kind)
    expected = f"ETA {last:.0f} s, as last time" if last is not None else "its first start here may take minutes"
    console.print(f"starting the vLLM engine on the {device} for {arguments['model']}: {expected}", soft_wrap=True)
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    console.print(f"the vLLM engine is ready after {seconds:.0f} s", soft_wrap=True)
    # Read again: another run may have started an engine meanwhile.
    write_atomically(file, json.dumps({**_durations(file), kind: round(seconds, 1)}, indent=1))


def _durations(file: Path) -> dict[str, float]:
    try:
        found = read_json(file)
    except DataError:  # none yet; or a broken file, which the next start replaces: an ETA must not end a run
        return {}
    return found if isinstance(found, dict) else {}
