"""vLLM's engine inside the trainer's process: started without disturbing it, loaded from its memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordexp import distributed
from coordexp.background import Prefetcher
from coordexp.config.rollout import RepeatTerminateConfig, VLLMConfig
from coordexp.engine.arguments import own_arguments, section_arguments
from coordexp.engine.engine_process import (
    PLUGINS,
    default_group_kept,
    engine_environment,
    environment_kept,
    has_gpu,
    needed_plugins,
    settings_kept,
)
from coordexp.engine.guard_activation import activation_environment, check_guard
from coordexp.errors import AlignmentError, DataError, RolloutError, require
from coordexp.rollouts.backend import AdapterWeights

ADVICE = (
    "lower rollout_matching.vllm.gpu_memory_utilization or max_num_seqs, set rollout_matching.offload, or write "
    "rollout_matching.rollout_backend: hf"
)
ENGINE_AT_FAULT = (
    "the engine does not do what it is asked: write rollout_matching.rollout_backend: hf, or install a version of vLLM "
    "that this one was tested with"
)

AHEAD = 16  # requests that may wait with their processed images: megabytes each, in main memory
PREPARE_S = 600.0  # far beyond what any image needs: a file system that hangs


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to the engine: prompt ids with one placeholder per image, vLLM's sampling parameters. ``open_image``
    is called in another thread; ``image_grid_thw`` is the trainer's, None if unknown; ``sample_id`` names it in
    errors."""

    request_id: str
    sample_id: str
    token_ids: Sequence[int]
    open_image: Callable[[], Any]
    image_grid_thw: Sequence[int] | None
    sampling: Any


class InProcessEngine:
    """A vLLM engine of which this process holds one worker. Every method that touches weights or memory is collective
    over the ranks whose engines were started together."""

    def __init__(self, arguments: Mapping[str, Any], max_in_flight: int) -> None:
        """Start it: seconds to minutes. ``arguments``: those of vLLM's ``EngineArgs``.

        Raises:
            RolloutError.
        """
        self._max_in_flight = max_in_flight
        self._found_group = dist.is_initialized()
        self.vllm: Any = None
        with settings_kept(), environment_kept(_environment()):
            from coordexp.engine.cpu_patches import unnamed_shared_memory

            with unnamed_shared_memory():
                self.vllm = _named("the engine could not be started", lambda: _start(arguments))
        self._can_sleep = has_gpu() and bool(arguments.get("enable_sleep_mode"))

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the engine's weights."""
        return self.ask_worker(lambda worker: worker.model_runner.model_config.dtype)

    def take(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load some of the trainer's weights, in the background. They must not change before :meth:`commit`.

        Raises:
            RolloutError: a tensor has no place in the engine, or loading an earlier one failed.
        """
        _named("the push of weights failed", lambda: self.ask_worker(lambda worker: worker.receiver.take(bucket)))

    def take_adapter(self, adapter: AdapterWeights) -> None:
        """Replace the engine's adapter. Raises vLLM's own errors if it cannot take it."""
        self.ask_worker(lambda worker: worker.take_adapter(dict(adapter.config), list(adapter.tensors)))

    def commit(self, version: int, *, wants_checksum: bool) -> dict[str, Any]:
        """End a push, and drop everything that was computed with the old weights; returns the worker's report.

        Raises:
            RolloutError: one of the engine's weights did not come, or loading failed.
        """
        report = _named(
            "the push of weights failed",
            lambda: self.ask_worker(lambda worker: worker.process_weights_after_loading(version, wants_checksum)),
        )
        if not self.vllm.reset_prefix_cache():
            raise RolloutError("the colocated vLLM engine: its prefix cache could not be emptied; a request still runs")
        self.vllm.reset_encoder_cache()
        self.vllm.reset_mm_cache()
        return report

    def abandon_push(self) -> None:
        """Let the next push start afresh."""
        self.ask_worker(lambda worker: worker.receiver.close())

    def run(self, prompts: Sequence[Prompt], lora_request: Any = None) -> Iterator[Any]:
        """vLLM's ``RequestOutput`` of each prompt as it finishes; at most ``max_in_flight`` are decoded at once.

        Images are opened and processed while others decode, and admitted in the order of ``prompts`` as soon as one has
        ended: the schedule depends on the prompts alone, so all ranks of one model run the same.
        """
        waiting = Prefetcher(
            prompts, self._render, ahead=AHEAD, deadline_s=PREPARE_S, timeout_error=_timeout_error, name="prompts"
        )
        try:
            with waiting:
                yield from self._decoded(waiting, lora_request)
        finally:
            if waiting.has_unconsumed:  # vLLM's image cache remembers some that the engine never saw
                self.vllm.reset_mm_cache()

    def _decoded(self, waiting: Prefetcher[Prompt, Any], lora_request: Any) -> Iterator[Any]:
        decoding: set[str] = set()
        try:
            while waiting or decoding:
                while waiting and len(decoding) < self._max_in_flight:
                    prompt, rendered = waiting.take()
                    _named(_name_of(prompt), lambda one=prompt, what=rendered: self._add(one, what, lora_request))
                    decoding.add(prompt.request_id)
                for output in _named("decoding failed", self.vllm.step):
                    if output.finished:
                        if output.request_id not in decoding:
                            raise RolloutError(
                                f"the colocated vLLM engine: an answer to {output.request_id}, which owes none; "
                                f"{ENGINE_AT_FAULT}"
                            )
                        decoding.remove(output.request_id)
                        yield output
                if decoding and not self.vllm.has_unfinished_requests():
                    raise RolloutError(
                        f"the colocated vLLM engine: {len(decoding)} requests were never answered, "
                        f"{min(decoding)} among them; {ENGINE_AT_FAULT}"
                    )
        finally:
            if decoding:
                self.vllm.abort_request(list(decoding))

    def ask_worker(self, question: Callable[[Any], Any]) -> Any:
        """``question(worker)`` of this process's worker."""
        return self.vllm.collective_rpc(question)[0]

    def sleep(self, level: int) -> None:
        """Give device memory back until :meth:`wake_up`; 1 keeps the weights on the host.

        Weights are overwritten before the next answer, but level 2, which drops them, drops more: vLLM restores only
        registered buffers, and its Qwen3-VL adds ``deepstack_input_embeds``, plain tensors that must be zero at text
        positions, to the hidden states of every step.
        """
        if level and self._can_sleep:
            _named("the engine could not go to sleep", lambda: self.vllm.sleep(level))

    def wake_up(self, parts: Sequence[str]) -> None:
        """Take memory again for ``parts`` of ``weights`` and ``kv_cache``; nothing where nothing sleeps."""
        if self._can_sleep and self.vllm.is_sleeping():
            _named("the engine could not wake up", lambda: self.vllm.wake_up(list(parts)))

    def close(self) -> None:
        """End the engine and free what it holds; the learner's process group stays. Safe to call twice."""
        engine, self.vllm = self.vllm, None
        if engine is None:
            return
        with settings_kept(), environment_kept(), default_group_kept(self._found_group):
            engine.engine_core.shutdown()

    def _render(self, prompt: Prompt) -> Any:
        """vLLM's preprocessing of a prompt: the image opened, resized and split, placeholders expanded. In a thread
        next to decoding, as in vLLM's own servers; one at a time, because of its cache of images."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        try:
            image = prompt.open_image()
        except DataError as error:
            raise DataError(f"{error} ({_name_of(prompt)})") from error
        content = {"prompt_token_ids": list(prompt.token_ids), "multi_modal_data": {"image": image}}

        def render() -> Any:
            (rendered,) = self.vllm.renderer.render_cmpl([parse_model_prompt(self.vllm.model_config, content)])
            return rendered

        rendered = _named(_name_of(prompt), render)
        (image,) = rendered["mm_kwargs"]["image"]
        # None: in vLLM's cache, and compared when it got there. Other numbers of tokens show in the prompt's ids.
        if image is not None and prompt.image_grid_thw is not None:
            ours, seen = list(prompt.image_grid_thw), image["image_grid_thw"].data.flatten().tolist()
            if ours != seen and math.prod(ours) == math.prod(seen):
                raise AlignmentError(
                    f"{_name_of(prompt)}: its image_grid_thw is {seen} in vLLM and {ours} in the trainer, so the image "
                    f"was turned or resized on the way; {ENGINE_AT_FAULT}"
                )
        return rendered

    def _add(self, prompt: Prompt, rendered: Any, lora_request: Any) -> None:
        self.vllm.add_request(prompt.request_id, rendered, prompt.sampling, lora_request=lora_request)


def _name_of(prompt: Prompt) -> str:
    return f"request {prompt.request_id} of sample {prompt.sample_id}"


def _timeout_error(prompt: Prompt) -> RolloutError:
    return RolloutError(
        f"{_name_of(prompt)}: its prompt and image are not ready after {PREPARE_S:g} s; see whether the file system "
        "hangs, and start again with training.resume_from_checkpoint: true"
    )


def _environment() -> dict[str, str]:
    """Variables for the engine's start; those that are set already are kept."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for what --json prints
        PLUGINS: needed_plugins(),
    }
    # A second process per engine would not share the learner's memory.
    return engine_environment({**quiet, **os.environ}, gpu=has_gpu()) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def _named(what: str, act: Callable[[], Any]) -> Any:
    """``act()``; vLLM's errors (bad input, too little memory, a broken engine) become RolloutErrors."""
    from vllm.exceptions import VLLMError

    try:
        return act()
    except (VLLMError, ValueError, RuntimeError, AssertionError, OSError) as error:
        raise RolloutError(f"the colocated vLLM engine: {what}: {type(error).__name__}: {error}; {ADVICE}") from error


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One colocated engine. ``config``: the resolved section; ``cap``: sequences that it decodes at once;
    ``holds_names``: requests may bring a closed list of class names."""

    config: VLLMConfig
    repeat_terminate: RepeatTerminateConfig
    model: Path
    cap: int
    holds_names: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's ``EngineArgs``."""
        return {
            **section_arguments(self.config),
            **own_arguments(self.model, self.repeat_terminate.enabled, self.holds_names),
            "max_num_seqs": self.cap,
            # Ranks are started by torchrun, and each takes the device that torchrun gave it.
            "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
            "enable_sleep_mode": self.config.sleep_level > 0,
            # Weights are replaced before the first answer, but 'dummy' would randomise buffers too, which none covers.
            "load_format": "auto",
            "skip_mm_profiling": False,
        }

    def start(self) -> InProcessEngine:
        """The engine, guarding its answers exactly as the configuration says.

        Raises:
            MissingDependency, RolloutError.
        """
        # vLLM's import sets variables, which the trainer's children would inherit.
        with environment_kept(activation_environment(self.repeat_terminate)):
            require("vllm", "rollout_matching.rollout_backend: vllm")
            from coordexp.engine.logits_processors import check_known_tokens, check_names, holds_names

            engine = InProcessEngine(self.arguments(), self.cap)
            try:
                status = engine.ask_worker(lambda worker: worker.coordexp_status())
                check_guard([status], self.repeat_terminate)
                check_known_tokens([status])
                if self.holds_names:
                    check_names([engine.ask_worker(holds_names)])
            except RolloutError:
                engine.close()
                raise
        return engine
