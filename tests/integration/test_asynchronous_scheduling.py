"""The repeat guard and lists of class names in a vLLM engine that schedules asynchronously, as on GPUs.

vLLM switches this off on CPUs. Here it is on: scheduler, batch queue, model runner and processors are vLLM's own and
ours, and only CUDA's streams and events are stand-ins, because copies from a CPU to itself are done at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.rollouts import SeedContext, rollout_session
from support.forked import ENGINES, Handle, by_file, forked
from support.rollout_servers import (
    GUARD,
    GUARDED_TOKENS,
    colocated,
    disturb,
    greedy_tokens,
    load_served,
    requests_of,
)
from support.settings import first_trigger

SEEDS = SeedContext(1, 0, 0, 0)
KEYS: dict[str, Any] = {
    "rollout_matching__repeat_terminate": GUARD,
    "rollout_matching__max_new_tokens": GUARDED_TOKENS,
    "rollout_matching__decode_batch_size": 12,
    "rollout_matching__decoding__skip_forced_tokens": False,
}
# So little room in the cache that requests are preempted and start again.
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 17, "enable_prefix_caching": False}


class Instant:
    """A stream or an event of a device that is never behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def on_stream(_: Any) -> Iterator[None]:
    yield


def schedule_asynchronously(seen: Counter[str]) -> None:
    """Switch it on for engines of this process; counts placeholders in answers before sampling, and preemptions."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    cuda: Any = torch.cuda
    torch.Event = cuda.Event = cuda.Stream = Instant  # type: ignore[misc]
    cuda.current_stream, cuda.stream = Instant, on_stream
    check, fill_in, preempt = (
        CpuPlatform.check_and_update_config,
        InputBatch.update_async_output_token_ids,
        Scheduler._preempt_request,
    )

    def stay_on(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    def count_placeholders(batch: Any) -> None:
        seen["placeholders"] += sum(-1 in answer for answer in batch.sampling_metadata.output_token_ids)
        fill_in(batch)

    def count_preemptions(*args: Any, **kwargs: Any) -> Any:
        seen["preemptions"] += 1
        return preempt(*args, **kwargs)

    platform: Any = CpuPlatform
    platform.check_and_update_config = staticmethod(stay_on)
    InputBatch.update_async_output_token_ids = count_placeholders  # type: ignore[method-assign]
    Scheduler._preempt_request = count_preemptions  # type: ignore[method-assign]


def answer(folder: Path) -> None:
    """Guarded answers of two weight versions, and sampled ones with class names; first in vLLM's CPU order."""
    trainer, seen, found = load_served(), Counter[str](), {}
    requests, settings = requests_of(trainer, 12), RepeatTerminateConfig(**GUARD)
    for order in ("one after the other", "asynchronous"):
        if order == "asynchronous":
            schedule_asynchronously(seen)
        names, sampled = ["a red circle", "b"], {**KEYS, "rollout_matching__decoding__temperature": 1.0}
        with closing(colocated(trainer, folder, names=names, **sampled)) as backend, rollout_session(backend, 0):
            found[f"{order}, named"] = [list(one.response_token_ids) for one in backend.generate(requests, SEEDS)]
    found["differences"] = []
    with closing(colocated(trainer, folder, **KEYS)) as backend:
        backend.engine_arguments |= CROWDED
        for version in (0, 1):
            with rollout_session(backend, version):
                rollouts = backend.generate(requests, SEEDS)
                config = backend.engine.vllm.vllm_config.scheduler_config
            for free, one in zip(greedy_tokens(trainer, requests, GUARDED_TOKENS), rollouts, strict=True):
                trigger = first_trigger(free, settings)
                cut = len(free) if trigger is None else trigger.num_new_tokens
                seen["ended by the guard"] += one.repeat_terminated
                if (list(one.response_token_ids), one.repeat_terminated) != (free[:cut], trigger is not None):
                    found["differences"].append(f"version {version}, {one.sample_id}")
            disturb(trainer, version)
    found["scheduler"] = config.get_scheduler_cls().__name__
    (folder / "found.json").write_text(json.dumps({**found, **seen}), encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("asynchronous")
    log = folder / "log"
    assert Handle(forked(*by_file(answer, folder), log=log, behind=ENGINES)).wait(timeout=300) == 0, log.read_text()[
        -4000:
    ]
    return {**json.loads((folder / "found.json").read_text()), "log": log.read_text()}


def test_the_guard_ends_answers_at_the_same_token(found: dict[str, Any]) -> None:
    """Where it ends the whole answers of transformers, also of requests that were preempted, after each push."""
    assert found["scheduler"] == "AsyncScheduler" and found["placeholders"] and found["preemptions"]
    assert found["differences"] == [] and found["ended by the guard"]


def test_answers_under_a_closed_list_are_the_same(found: dict[str, Any]) -> None:
    assert found["asynchronous, named"] == found["one after the other, named"]
    assert len({tuple(one) for one in found["asynchronous, named"]}) > 1


def test_the_start_of_an_engine_is_announced_with_an_eta(found: dict[str, Any]) -> None:
    assert found["log"].count("starting the vLLM engine on the ") == found["log"].count("ready after") == 3
    assert "ETA" in found["log"]
