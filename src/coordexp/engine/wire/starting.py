"""Progress lines on stderr while vLLM's engines start, which takes seconds to minutes, and how their errors are shown.
Does not import vLLM."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from coordexp import distributed
from coordexp.data.progress_bar import literal_console
from coordexp.errors import RolloutError

SKIPPING = "forced tokens are skipped; rollout_matching.decoding.skip_forced_tokens: false turns this off"
MEMORY_ADVICE = (
    "lower rollout_matching.vllm.gpu_memory_utilization or max_num_seqs, set rollout_matching.offload, or write "
    "rollout_matching.rollout_backend: hf"
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


@contextmanager
def announced_start(arguments: Mapping[str, Any], *, gpu: bool) -> Iterator[None]:
    """Print on rank 0 that an engine with these arguments starts, and after the block how long it took. After an error
    the second line is left out."""
    if not distributed.is_main():
        yield
        return
    console, device, started = literal_console(stderr=True), "GPU" if gpu else "CPU", time.monotonic()
    console.print(
        f"starting the vLLM engine on the {device} for {arguments['model']}: it may take minutes", soft_wrap=True
    )
    if "speculative_config" in arguments:
        console.print(SKIPPING, soft_wrap=True)
    yield
    console.print(f"the vLLM engine is ready after {time.monotonic() - started:.0f} s", soft_wrap=True)


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
