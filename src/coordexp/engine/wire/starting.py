"""Progress lines on stderr while vLLM's engines start, which takes seconds to minutes, and how their errors are shown.
Does not import vLLM."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.data.files import cache_folder, write_atomically
from coordexp.data.progress_bar import literal_console
from coordexp.errors import DataError, RolloutError
from coordexp.reading import read_json

DURATIONS = "engine_starts.json"  # in the cache folder: seconds of the last start of each kind
SKIPPING = "forced tokens are skipped; rollout_matching.decoding.skip_forced_tokens: false turns this off"
MEMORY_ADVICE = (
    "lower rollout_matching.vllm.gpu_memory_utilization or engine_args.max_num_seqs, set rollout_matching.offload, or "
    "write rollout_matching.rollout_backend: hf"
)
SHARE_ADVICE = (
    "the engine's share of the device is too small for its weights and one answer: raise "
    "rollout_matching.vllm.gpu_memory_utilization, or lower vllm.max_model_len (null means global_max_length)"
)
# Most of vLLM's checks of its arguments come only at the end of a start.
ENGINE_AT_FAULT = (
    "if nothing in rollout_matching.vllm is its cause, write rollout_matching.rollout_backend: hf, or install a "
    "version of vLLM that this one was tested with"
)
_SETTINGS = ("dtype", "tensor_parallel_size", "data_parallel_size", "max_model_len", "enforce_eager", "enable_lora")


@contextmanager
def announced_start(arguments: Mapping[str, Any], *, gpu: bool) -> Iterator[None]:
    """Print on rank 0 that an engine with these arguments starts, with the duration of the last such start on this
    machine, and after the block how long it took. After an error the second line is left out."""
    if not distributed.is_main():
        yield
        return
    console, device = literal_console(stderr=True), "GPU" if gpu else "CPU"
    kind = json.dumps([str(arguments["model"]), device, *(arguments.get(name) for name in _SETTINGS)])
    file = cache_folder() / DURATIONS
    last = _durations(file).get(kind)
    expected = f"ETA {last:.0f} s, as last time" if last is not None else "its first start here may take minutes"
    console.print(f"starting the vLLM engine on the {device} for {arguments['model']}: {expected}", soft_wrap=True)
    if "speculative_config" in arguments:
        console.print(SKIPPING, soft_wrap=True)
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    console.print(f"the vLLM engine is ready after {seconds:.0f} s", soft_wrap=True)
    # Read again: another run may have started an engine meanwhile. A full disk must not end a run for an ETA.
    with suppress(OSError):
        write_atomically(file, json.dumps({**_durations(file), kind: round(seconds, 1)}, indent=1))


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn vLLM's errors (bad input, too little memory, a broken engine) into RolloutErrors that name ``what``, with
    advice."""
    from vllm.exceptions import VLLMError

    try:
        yield
    except (VLLMError, ValueError, RuntimeError, AssertionError, OSError) as error:
        text, advice = " ".join(str(error).split()), ENGINE_AT_FAULT
        if "increasing `gpu_memory_utilization`" in text:
            advice = SHARE_ADVICE
        elif re.search(r"memory|kv cache", text, re.IGNORECASE):
            advice = MEMORY_ADVICE
        raise RolloutError(f"{what}: {type(error).__name__}: {text}; {advice}") from error


def _durations(file: Path) -> dict[str, float]:
    try:
        found = read_json(file)
    except DataError:  # no file yet, or a broken one, which the next start replaces: a missing ETA must not fail a run
        return {}
    return found if isinstance(found, dict) else {}
