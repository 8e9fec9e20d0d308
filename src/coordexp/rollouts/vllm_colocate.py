"""Rollouts by a vLLM engine inside each learner process, on the learner's own device.

The engine starts lazily, at the first :meth:`~ColocatedBackend.sync_weights`, inside the offload context, and is loaded
from the learner's memory before every round. With ``tensor_parallel_size`` T > 1, T neighbouring ranks share one model:
each of them gives the engine the requests of all T, and keeps the answers to its own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.config.vllm import VLLMConfig
from coordexp.coords import CoordVocab
from coordexp.errors import ConfigError, RolloutError
from coordexp.extras import require
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import Answer, DecodingOptions, RolloutRound, Seeds, WeightSource
from coordexp.rollouts.engine.guard_activation import (
    GUARD_PROCESSOR,
    REQUEST_KEY,
    activation_environment,
    check_guard,
)

logger = logging.getLogger("coordexp")

EXTENSION = "coordexp.rollouts.engine.worker.WeightSyncExtension"  # by name: importing it would import vLLM


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One request of any rank of the tensor-parallel group: what an engine needs of it, as JSON can carry it."""

    rank: int
    round_idx: int
    index: int
    seed: int
    image: str
    prompt_token_ids: Sequence[int]

    @property
    def request_id(self) -> str:
        return f"{self.rank}-{self.round_idx}-{self.index}"


class ColocatedBackend:
    """vLLM on the learner's own devices."""

    def __init__(
        self,
        config: VLLMConfig,
        *,
        model: Path,
        dtype: str,
        max_model_len: int,
        options: DecodingOptions,
        decode_batch_size: int,
        vocab: CoordVocab,
        image_token_id: int,
        num_embeddings: int,
        weights: WeightSource,
        open_image: Callable[[Path], Any],
        offload: Callable[[], AbstractContextManager[None]],
        repeat_terminate: RepeatTerminateConfig,
        lora_rank: int,
    ) -> None:
        self._config = config
        self._model = model
        self._dtype = config.dtype or dtype
        self._max_model_len = config.max_model_len or max_model_len
        self._options = options
        self._decode_batch_size = decode_batch_size
        self._vocab = vocab
        self._image_token_id = image_token_id
        self._num_embeddings = num_embeddings
        self._weights = weights
        self._open_image = open_image
        self._offload = offload
        self._repeat_terminate = repeat_terminate
        self._lora_rank = config.max_lora_rank or lora_rank
        self._mode = config.sync.resolved(config.enable_lora)
        self._engine: Any = None
        self._borrowed = ExitStack()
        self._version = 0
        self._pushes = 0
        self._compared = False  # whether a push has been read back yet
        self._seeds: dict[str, list[int]] = {}
        self._fallbacks: list[str] = []
        self._metrics: Counter[str] = Counter()

    def generate(self, requests: Sequence[RolloutRequest], seeds: Seeds) -> list[Rollout]:
        answers = sorted(self.generate_window([RolloutRound(tuple(requests), seeds)]), key=lambda answer: answer.index)
        return [answer.rollout for answer in answers]

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[Answer]:
        """Every request is a call of its own to the engine, with its own seed. Collective where T > 1."""
        if self._engine is None:
            raise RolloutError("the colocated engine has no weights yet; call sync_weights before asking it")
        wanted = [
            _Wanted(distributed.rank(), r, i, one.seeds.seed_of(i), str(request.image), request.prompt_token_ids)
            for r, one in enumerate(rounds)
            for i, request in enumerate(one.requests)
        ]
        self._seeds = {str(one.seeds.micro_step_idx): [one.seeds.seed_of(i) for i in range(len(one.requests))]
                       for one in rounds}  # fmt: skip
        by_id = {one.request_id: one for one in wanted}
        answered = 0
        for output in self._engine.run([self._prompt(one) for one in self._of_group(wanted)], self._lora_request()):
            one = by_id.get(output.request_id)
            if one is not None:
                answered += 1
                request = rounds[one.round_idx].requests[one.index]
                yield Answer(one.round_idx, one.index, self._rollout(request, output))
        assert answered == len(wanted), f"{answered} answers to {len(wanted)} requests"

    def batch_size(self, decode_batch_size: int) -> int:
        """What this rank's share of its engine decodes at once."""
        return decode_batch_size

    def sync_weights(self, version: int) -> None:
        try:
            self._borrowed.enter_context(self._offload())
            with distributed.together("starting the colocated engine"):
                self._wake()
            with distributed.together("the push into the colocated engine"):
                self._push(version)
        except BaseException:
            self.rest()
            raise
        self._version = version

    def rest(self) -> None:
        try:
            if self._engine is not None:
                self._engine.sleep(self._config.sleep_level)
        finally:
            self._borrowed.close()

    def last_report(self) -> Mapping[str, Any]:
        return {
            "backend": "vllm",
            "mode": "colocate",
            "weight_version": self._version,
            "sync_mode": self._mode,
            "fallbacks": list(self._fallbacks),
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "decode_batch_size": self._decode_batch_size,
            "cap": self._cap,
            "decoding": asdict(self._options),
            "seeds": self._seeds,
        }

    def take_metrics(self) -> Mapping[str, float]:
        taken, self._metrics = self._metrics, Counter()
        return {"rollout/repeat_terminate_active": float(self._repeat_terminate.enabled), **taken}

    def close(self) -> None:
        self._borrowed.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _cap(self) -> int:
        """Sequences that one engine decodes at once: ``decode_batch_size`` for each of its devices."""
        cap = self._decode_batch_size * self._config.tensor_parallel_size
        return cap if self._config.max_num_seqs is None else min(cap, self._config.max_num_seqs)

    def _wake(self) -> None:
        if self._engine is None:
            self._engine = _start_engine(self.engine_arguments(), self._cap, self._repeat_terminate)
        else:
            self._engine.wake_up(["weights"])

    def _push(self, version: int) -> None:
        """The learner's weights into the engine, and room for its cache again."""
        if self._mode == "adapter" and not self._push_adapter(version):
            self._mode = "full"
        if self._mode == "full":
            every = self._config.sync.checksum_every
            compares = not self._compared or (every > 0 and self._pushes % every == 0)
            with self._weights.full() as named:
                self._engine.load(named, version, self._config.sync.bucket_mb << 20, compares_checksum=compares)
            self._compared |= compares
        self._engine.wake_up(["kv_cache"])
        self._pushes += 1

    def _push_adapter(self, version: int) -> bool:
        adapter = self._weights.adapter()
        if adapter is None:
            raise ConfigError(
                "rollout_matching.vllm.sync.mode: adapter, but the learner has no adapter; write sync.mode: full"
            )
        try:
            self._engine.load_adapter(adapter, version)
        except RolloutError as error:
            if not self._config.sync.fallback_to_full:
                raise RolloutError(
                    f"{error}; write rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"
                ) from error
            logger.warning("adapter push failed (%s); merged weights are pushed from here on", error)
            self._fallbacks.append(f"version {version}: {error}")
            self._metrics["rollout/sync_fallbacks_total"] += 1
            return False
        return True

    def engine_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's ``EngineArgs``; what the configuration leaves to vLLM is left out."""
        config = self._config
        arguments: dict[str, Any] = {
            "model": str(self._model),
            "dtype": self._dtype,
            "max_model_len": self._max_model_len,
            "max_num_seqs": self._cap,
            "tensor_parallel_size": config.tensor_parallel_size,
            # Ranks are started by torchrun, and each takes the device that torchrun gave it.
            "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enforce_eager": config.enforce_eager,
            "disable_custom_all_reduce": config.disable_custom_all_reduce,
            "enable_sleep_mode": config.sleep_level > 0,
            "limit_mm_per_prompt": config.limit_mm_per_prompt.model_dump(),
            "worker_extension_cls": EXTENSION,
            # Weights are replaced before the first answer, but 'dummy' would randomise buffers too, which none covers.
            "load_format": "auto",
            "generation_config": "vllm",  # the YAML decides, not the checkpoint's generation_config.json
            "skip_mm_profiling": False,
            "seed": 0,
            "disable_log_stats": True,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "kv_cache_dtype": config.kv_cache_dtype,
            "cpu_offload_gb": config.cpu_offload_gb,
            "mm_encoder_tp_mode": config.mm_encoder_tp_mode,
        }
        if config.enable_lora:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": self._lora_rank}
        if self._repeat_terminate.enabled:
            arguments |= {"logits_processors": [GUARD_PROCESSOR], "async_scheduling": False}
        return {name: value for name, value in arguments.items() if value is not None}

    def _of_group(self, own: Sequence[_Wanted]) -> list[_Wanted]:
        """The requests of all ranks that share this rank's engine, in one order on all of them."""
        size = self._config.tensor_parallel_size
        if size == 1:
            return list(own)
        first = distributed.rank() // size * size
        parts = distributed.gather_json([asdict(one) for one in own])[first : first + size]
        return [_Wanted(**one) for part in parts for one in part]

    def _prompt(self, wanted: _Wanted) -> Any:
        from coordexp.rollouts.engine.in_process import Prompt

        # vLLM puts one placeholder per image in and expands it itself; what it made of it is compared afterwards.
        ids = [
            token
            for token, run in groupby(wanted.prompt_token_ids)
            for token in ([token] if token == self._image_token_id else run)
        ]
        image = self._open_image(Path(wanted.image))
        return Prompt(wanted.request_id, ids, image, self._sampling(wanted))

    def _sampling(self, wanted: _Wanted) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options, guarded = self._options, self._repeat_terminate.enabled
        arguments: dict[str, Any] = {}
        if guarded:
            arguments["extra_args"] = {REQUEST_KEY: wanted.request_id}
        if options.temperature > 0 and self._num_embeddings > len(self._vocab):
            # Checkpoints may have more embedding rows than the tokenizer has tokens: such an id decodes to nothing.
            arguments["logit_bias"] = dict.fromkeys(range(len(self._vocab), self._num_embeddings), -100.0)
        return SamplingParams(
            max_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            repetition_penalty=options.repetition_penalty,
            seed=wanted.seed,
            stop_token_ids=[self._vocab.eos_id],
            ignore_eos=not guarded,  # only <|im_end|> ends an answer, whatever else the checkpoint calls an end
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **arguments,
        )

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        ended = self._vocab.eos_id in ids
        if not ended and completion.finish_reason != "length":
            raise RolloutError(
                f"{request.sample_id}: the engine ended an answer without <|im_end|> ({completion.finish_reason}, "
                f"{completion.stop_reason!r})"
            )
        response = tuple(ids[: ids.index(self._vocab.eos_id)] if ended else ids)
        return Rollout(
            sample_id=request.sample_id,
            prompt_token_ids=tuple(output.prompt_token_ids),
            response_token_ids=response,
            text=self._vocab.decode(response),
            truncated=not ended,
            repeat_terminated=ended and self._was_guarded(output.request_id),
            weight_version=self._version,
        )

    def _was_guarded(self, request_id: str) -> bool:
        if not self._repeat_terminate.enabled:
            return False
        return bool(self._engine.ask_worker(lambda worker: worker.coordexp_pop_triggers([request_id])))

    def _lora_request(self) -> Any:
        if self._mode != "adapter":
            return None
        from vllm.lora.request import LoRARequest

        from coordexp.rollouts.engine.worker import ADAPTER_ID, ADAPTER_NAME, ADAPTER_PATH

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_PATH)


def _start_engine(arguments: Mapping[str, Any], cap: int, repeat_terminate: RepeatTerminateConfig) -> Any:
    """Start the engine, and make sure that it guards its answers where it was told to."""
    require("vllm", "rollout_matching.rollout_backend: vllm")
    from coordexp.rollouts.engine.in_process import InProcessEngine

    os.environ.update(activation_environment(repeat_terminate))
    engine = InProcessEngine(arguments, cap)
    try:
        check_guard([engine.ask_worker(lambda worker: worker.coordexp_status())], repeat_terminate)
    except RolloutError:
        engine.close()
        raise
    return engine
