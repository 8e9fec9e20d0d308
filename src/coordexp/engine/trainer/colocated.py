"""Rollouts by a vLLM engine inside each trainer process, on the trainer's own device.

The engine starts at the first :meth:`~ColocatedBackend.sync_weights`, inside the offload context. Before every round it
gets its weights from the trainer's memory: all weights, or only the adapter if vLLM supports it. With
``tensor_parallel_size`` T > 1, T neighbouring ranks share one model: each submits the requests of all T, in the same
order, and keeps the answers to its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordexp import distributed
from coordexp.background import Prefetcher
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.trainer.push import Named, WeightPusher, check_checksum
from coordexp.engine.wire.arguments import (
    activation_environment,
    cache_kept_by,
    check_processors,
    end_at_turn_end,
    extra_args,
    own_arguments,
    pushed_adapter,
    section_arguments,
    with_image_size,
    with_room_for_drafts,
)
from coordexp.engine.wire.engine_process import (
    PLUGINS,
    default_group_kept,
    engine_environment,
    environment_kept,
    has_gpu,
    image_threads,
    needed_plugins,
    settings_kept,
)
from coordexp.engine.wire.starting import ENGINE_AT_FAULT, announced_start, engine_errors
from coordexp.errors import AlignmentError, DataError, RolloutError, require
from coordexp.heavy_imports import heavy_imports
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import (
    DecodingOptions,
    IndexedRollout,
    RolloutBackend,
    RolloutRound,
    TrainerParts,
    response_tokens,
)
from coordexp.weight_sync import WeightVersion

AHEAD = 16  # requests that may wait with their processed images: megabytes each, in main memory
PREPARE_S = 600.0  # far more than an image needs, so only a hanging file system exceeds it


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to the engine, of any rank of the tensor-parallel group; JSON-serialisable. ``image_grid_thw``: as
    the trainer computed it, None if unknown. ``greedy``: ignore the configured temperature."""

    request_id: str
    seed: int
    sample_id: str
    image: str
    image_grid_thw: Sequence[int] | None
    token_ids: Sequence[int]  # one placeholder per image: vLLM expands it; the trainer compares the expanded ids later
    greedy: bool = False

    @property
    def name(self) -> str:
        return f"request {self.request_id} of sample {self.sample_id}"


class InProcessEngine:
    """A vLLM engine with one worker, in this process. Every method that touches weights or memory is collective
    over the ranks that started their engines together."""

    def __init__(self, arguments: Mapping[str, Any], max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._trainer_has_group = dist.is_initialized()
        self.vllm: Any = None
        environment = {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the output of --json
            PLUGINS: needed_plugins(),
            **os.environ,  # variables that are set already are kept
        }
        # A separate engine process could not read the trainer's memory.
        environment = engine_environment(environment, gpu=has_gpu()) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with settings_kept(), environment_kept(environment), _named("the engine could not be started"):
            self.vllm = _start(arguments)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))

    def commit(self, version: int, *, wants_checksum: bool) -> dict[str, Any]:
        """End a push and empty all caches of the old weights. Returns the worker's report."""
        with _named("the push of weights failed"):
            report = self.ask_worker(lambda worker: worker.process_weights_after_loading(version, wants_checksum))
        if (kept := cache_kept_by(self.vllm)) is not None:
            raise RolloutError(
                f"the colocated vLLM engine: its {kept} cache could not be emptied; a request still runs"
            )
        return report

    def run(
        self,
        prompts: Sequence[Prompt],
        open_image: Callable[[Path], Any],
        sampling_of: Callable[[Prompt], Any],
        lora_request: Any = None,
    ) -> Iterator[Any]:
        """vLLM's ``RequestOutput`` of each prompt as it finishes. A new prompt is added whenever one finishes. The
        schedule depends only on the prompts, so all ranks of one model run the same one."""

        def timeout_error(prompt: Prompt) -> RolloutError:
            return RolloutError(
                f"{prompt.name}: its prompt and image are not ready after {PREPARE_S:g} s; see whether the file system "
                "hangs, and start again with training.resume_from_checkpoint: true"
            )

        render = partial(self.render, open_image=open_image)
        waiting = Prefetcher(
            prompts,
            render,
            ahead=AHEAD,
            deadline_s=PREPARE_S,
            timeout_error=timeout_error,
            name="prompts",
            threads=image_threads(),
        )
        decoding: set[str] = set()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with waiting:
                while waiting or decoding:
                    while waiting and len(decoding) < self.max_in_flight:
                        prompt, rendered = waiting.take()
                        with _named(prompt.name):
                            sampling = sampling_of(prompt)
                            self.vllm.add_request(prompt.request_id, rendered, sampling, lora_request=lora_request)
                        decoding.add(prompt.request_id)
                    # Verifying drafts draws from the trainer's streams too, and drops what it draws there.
                    with _named("decoding failed"), torch.random.fork_rng(devices):
                        outputs = self.vllm.step()
                    for output in outputs:
                        if output.finished:
                            if output.request_id not in decoding:
                                raise RolloutError(
                                    f"the colocated vLLM engine: it answered {output.request_id}, which is not an open "
                                    f"request; {ENGINE_AT_FAULT}"
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
        return self.vllm.collective_rpc(question)[0]

    def sleep(self, level: int) -> None:
        """Release device memory until :meth:`wake_up`. Level 1 keeps a copy of the weights in main memory."""
        # Level 2 drops more than the weights: vLLM restores only registered buffers, and its Qwen3-VL adds
        # deepstack_input_embeds, plain tensors that must be zero at text positions, to the hidden states of every step.
        if level and self._can_sleep:
            with _named("the engine could not go to sleep"):
                self.vllm.sleep(level)

    def wake_up(self, parts: Sequence[str]) -> None:
        """Allocate memory again for ``parts`` (``weights``, ``kv_cache``) of a sleeping engine."""
        if self._can_sleep and self.vllm.is_sleeping():
            with _named("the engine could not wake up"):
                self.vllm.wake_up(list(parts))

    def close(self) -> None:
        """End the engine, and keep the trainer's process group. Safe to call twice."""
        engine, self.vllm = self.vllm, None
        if engine is None:
            return
        with settings_kept(), environment_kept(), default_group_kept(self._trainer_has_group):
            engine.engine_core.shutdown()

    def render(self, prompt: Prompt, open_image: Callable[[Path], Any]) -> Any:
        """Open and process a prompt's image for vLLM; any thread may do so while the engine decodes."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        try:
            image = open_image(Path(prompt.image))
        except DataError as error:
            raise DataError(f"{error} ({prompt.name})") from error
        content = {"prompt_token_ids": list(prompt.token_ids), "multi_modal_data": {"image": image}}
        with _named(prompt.name):
            (rendered,) = self.vllm.renderer.render_cmpl([parse_model_prompt(self.vllm.model_config, content)])
        (image,) = rendered["mm_kwargs"]["image"]
        # Another number of image tokens is found later, in the prompt's ids; another grid of as many tokens only here.
        if prompt.image_grid_thw is not None:
            ours, seen = list(prompt.image_grid_thw), image["image_grid_thw"].data.flatten().tolist()
            if ours != seen and math.prod(ours) == math.prod(seen):
                raise AlignmentError(
                    f"{prompt.name}: its image_grid_thw is {seen} in vLLM and {ours} in the trainer, so the image was "
                    f"turned or resized in between; {ENGINE_AT_FAULT}"
                )
        return rendered


def _start(arguments: Mapping[str, Any]) -> Any:
    with heavy_imports():
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    end_at_turn_end(engine)
    return engine


def _named(what: str) -> AbstractContextManager[None]:
    return engine_errors(f"the colocated vLLM engine: {what}")


class ColocatedPusher(WeightPusher):
    """Pushes into the engine of this process; every rank into its own."""

    converts = False  # the engine converts while it copies
    engine: Any = None

    def _begin(self, base: Path | None) -> torch.dtype | None:  # this process gave the engine its model
        return self.engine.ask_worker(lambda worker: worker.model_runner.model_config.dtype)

    def _send(self, tensors: Named, peft_config: Mapping[str, Any] | None = None) -> None:
        if peft_config is not None:  # without _named: the caller handles vLLM's own errors, by pushing full weights
            self.engine.ask_worker(lambda worker: worker.take_adapter(dict(peft_config), tensors))
            return
        with _named("the push of weights failed"):
            self.engine.ask_worker(lambda worker: worker.receiver.take(tensors))

    def _commit(self, weights: WeightVersion, expected: str | None) -> bool:
        report = self.engine.commit(weights.version, wants_checksum=expected is not None)
        check_checksum("the colocated vLLM engine", report["checksum"], expected)
        return True

    def _abort(self) -> None:
        self.engine.ask_worker(lambda worker: worker.receiver.close())


class ColocatedBackend(RolloutBackend):
    """vLLM on the trainer's own devices."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        trainer: TrainerParts,
        options: DecodingOptions,
        class_names: Sequence[str] = (),
    ) -> None:
        """``options``: those of ``config``. ``class_names``: those that answers may use, empty for any."""
        self._config = vllm = config.vllm
        self._repeat_terminate = config.repeat_terminate
        self._options = options
        self._decode_batch_size = config.decode_batch_size
        self._trainer = trainer
        self._class_names = tuple(class_names)
        cap = config.decode_batch_size * vllm.tensor_parallel_size
        self._cap = min(cap, vllm.given_args.get("max_num_seqs", cap))
        self.engine_arguments = {
            **section_arguments(vllm, gpu=has_gpu()),
            **own_arguments(
                trainer.checkpoint,
                config.repeat_terminate.enabled,
                bool(class_names),
                config.skips_forced_tokens(has_gpu()),
            ),
            "max_num_seqs": self._cap,
            # torchrun starts the ranks and assigns their devices.
            "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
            "enable_sleep_mode": vllm.sleep_level > 0 and has_gpu(),  # on a CPU it would save nothing
            # The first push replaces all weights, but not buffers, which load_format 'dummy' would randomise too.
            "load_format": "auto",
            "skip_mm_profiling": False,
        }
        self.pusher = ColocatedPusher(trainer.weights, vllm.sync)
        self.engine: Any = None
        self._num_fallbacks = 0  # since the metrics were last taken
        self._offloaded = ExitStack()  # open while the trainer's state is off the device
        self._version = 0
        self._needs_push = False  # since a push began that has not succeeded, or the engine was released
        self._seeds: dict[str, list[int]] = {}

    def start_engine(self) -> InProcessEngine:
        """Start the engine, with the repeat guard as configured. Raises MissingDependency, RolloutError."""
        # vLLM's import sets variables, which the trainer's children would inherit.
        with environment_kept(activation_environment(self._repeat_terminate)):
            require("vllm", "rollout_matching.rollout_backend: vllm")
            arguments = with_room_for_drafts(with_image_size(self.engine_arguments))
            with announced_start(arguments, gpu=has_gpu()):
                engine = InProcessEngine(arguments, self._cap)
            try:
                status = engine.ask_worker(lambda worker: worker.coordexp_status())
                check_processors([status], self._repeat_terminate, bool(self._class_names))
            except RolloutError:
                engine.close()
                raise
        return engine

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """Submits each request separately, with its own seed. A collective call if T > 1."""
        if self.engine is None or self._needs_push:
            raise RolloutError("the colocated engine has no weights yet; call sync_weights before generate_rounds")
        requests = {
            f"{distributed.rank()}-{r}-{i}": (r, i, request)
            for r, one in enumerate(rounds)
            for i, request in enumerate(one.requests)
        }
        prompts = [
            self.prompt_of(request_id, rounds[r].seeds.seed_of(i), request, rounds[r].greedy)
            for request_id, (r, i, request) in requests.items()
        ]
        self._seeds = {str(one.seeds.micro_step_idx): [one.seeds.seed_of(i) for i in range(len(one.requests))]
                       for one in rounds}  # fmt: skip
        size = self._config.tensor_parallel_size
        if size > 1:  # the requests of all ranks that share this rank's engine, in one order on all of them
            first = distributed.rank() // size * size
            parts = distributed.gather_json([asdict(prompt) for prompt in prompts])[first : first + size]
            prompts = [Prompt(**prompt) for part in parts for prompt in part]
        adapter = pushed_adapter() if self.pusher.mode == "adapter" else None
        for output in self.engine.run(prompts, self._trainer.open_image, self._sampling, adapter):
            if output.request_id in requests:
                r, i, request = requests[output.request_id]
                yield IndexedRollout(r, i, self._rollout(request, output))

    def prompt_of(self, request_id: str, seed: int, request: RolloutRequest, greedy: bool = False) -> Prompt:
        """The engine's form of the request: each image's run of placeholders is collapsed to one."""
        grid = request.model_inputs.get("image_grid_thw")
        ids = [
            token
            for token, run in groupby(request.prompt_token_ids)
            for token in ([token] if token == self._trainer.image_token_id else run)
        ]
        return Prompt(
            request_id,
            seed,
            request.sample_id,
            str(request.image),
            None if grid is None else grid.flatten().tolist(),
            ids,
            greedy,
        )

    @property
    def batch_size(self) -> int:
        return self._decode_batch_size

    def sync_weights(self, version: int) -> None:
        self._needs_push = True
        try:
            self._offloaded.enter_context(self._trainer.offload())
            with distributed.raise_on_all_ranks("starting the colocated engine"):
                if self.engine is None:
                    self.engine = self.pusher.engine = self.start_engine()
                else:
                    self.engine.wake_up(["weights"])
            report = self.pusher.push(version)
            self._num_fallbacks += report.fallback is not None
            with distributed.raise_on_all_ranks("waking the colocated engine"):
                self.engine.wake_up(["kv_cache"])
        except BaseException:
            self.release()
            raise
        self._version, self._needs_push = version, False

    def release(self) -> None:
        self._needs_push = True
        try:
            if self.engine is not None:
                self.engine.sleep(self._config.sleep_level)
        finally:
            self._offloaded.close()

    def last_report(self) -> Mapping[str, Any]:
        return {
            "backend": "vllm",
            "mode": "colocate",
            "weight_version": self._version,
            "sync_mode": self.pusher.mode,
            "fallbacks": list(self.pusher.fallbacks),
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "decode_batch_size": self._decode_batch_size,
            "cap": self._cap,
            "decoding": asdict(self._options),
            "seeds": self._seeds,
        }

    def take_metrics(self) -> Mapping[str, float]:
        taken, self._num_fallbacks = self._num_fallbacks, 0
        fallbacks = {"rollout/sync_fallbacks_total": float(taken)} if taken else {}
        return {"rollout/repeat_terminate_active": float(self._repeat_terminate.enabled), **fallbacks}

    def close(self) -> None:
        self._offloaded.close()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def _sampling(self, prompt: Prompt) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options, guarded = self._options, self._repeat_terminate.enabled
        return SamplingParams(
            max_tokens=options.max_new_tokens,
            temperature=0.0 if prompt.greedy else options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            repetition_penalty=options.repetition_penalty,
            seed=prompt.seed,
            stop_token_ids=[self._trainer.vocab.eos_id],
            ignore_eos=not guarded,  # only <|im_end|> ends an answer, whatever the tokenizer's end token is
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args(prompt.request_id, self._class_names),
        )

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        (completion,) = output.outputs
        where = f"the colocated vLLM engine, {request.sample_id}"
        if len(completion.token_ids) > self._options.max_new_tokens:
            raise RolloutError(
                f"{where}: the answer has {len(completion.token_ids)} tokens, and rollout_matching.max_new_tokens is "
                f"{self._options.max_new_tokens}; {ENGINE_AT_FAULT}"
            )
        answer = response_tokens(completion.token_ids, completion.finish_reason, self._trainer.vocab, where)
        repeated = []
        if self._repeat_terminate.enabled and answer.ended:
            repeated = self.engine.ask_worker(lambda worker: worker.coordexp_pop_triggers([output.request_id]))
        return Rollout(
            sample_id=request.sample_id,
            prompt_token_ids=tuple(output.prompt_token_ids),
            response_token_ids=answer.token_ids,
            text=self._trainer.vocab.decode(answer.token_ids),
            truncated=answer.truncated,
            repeat_terminated=bool(repeated),
            weight_version=self._version,
        )
