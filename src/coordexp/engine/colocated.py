"""Rollouts by a vLLM engine inside each learner process, on the learner's own device.

The engine starts lazily, at the first :meth:`~ColocatedBackend.sync_weights`, inside the offload context, and is loaded
from the learner's memory before every round. With ``tensor_parallel_size`` T > 1, T neighbouring ranks share one model:
each of them gives the engine the requests of all T, and keeps the answers to its own.

Weights are pushed into it whole, or the adapter alone while that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from coordexp import distributed
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.arguments import NAMES_KEY
from coordexp.engine.guard_activation import REQUEST_KEY
from coordexp.engine.in_process import ENGINE_AT_FAULT, EngineSpec, Prompt
from coordexp.engine.push import Mode, Named, WeightPusher, check_checksum
from coordexp.errors import RolloutError
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import (
    AdapterWeights,
    DecodingOptions,
    IndexedRollout,
    RolloutRound,
    Seeds,
    collect_in_order,
    response_tokens,
)
from coordexp.rollouts.learner import LearnerParts
from coordexp.weight_sync import WeightVersion


class ColocatedPusher(WeightPusher):
    """Pushes into the engine of this process. Every rank pushes into its own engine."""

    converts = False  # the engine converts while it copies
    engine: Any = None

    def close(self) -> None: ...

    def _begin(self, mode: Mode) -> torch.dtype | None:
        return self.engine.dtype

    def _send(self, bucket: Named) -> None:
        self.engine.take(bucket)

    def _send_adapter(self, adapter: AdapterWeights) -> None:
        self.engine.take_adapter(adapter)

    def _commit(self, weights: WeightVersion, expected: str | None) -> bool:
        report = self.engine.commit(weights.version, wants_checksum=expected is not None)
        check_checksum("the colocated vLLM engine", report["checksum"], expected)
        return True

    def _abort(self) -> None:
        self.engine.abandon_push()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One request of any rank of the tensor-parallel group, as an engine needs it; JSON can hold it."""

    rank: int
    round_idx: int
    index: int
    seed: int
    sample_id: str
    image: str
    image_grid_thw: Sequence[int] | None
    prompt_token_ids: Sequence[int]

    @property
    def request_id(self) -> str:
        return f"{self.rank}-{self.round_idx}-{self.index}"


class ColocatedBackend:
    """vLLM on the learner's own devices."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        learner: LearnerParts,
        options: DecodingOptions,
        names: Sequence[str] = (),
    ) -> None:
        """``options``: those of ``config``. ``names``: the closed list of descriptions; empty for any."""
        vllm, decode_batch_size = config.vllm, config.decode_batch_size
        self._config = vllm
        self._options = options
        self._decode_batch_size = decode_batch_size
        self._vocab = learner.vocab
        self._image_token_id = learner.image_token_id
        self._open_image = learner.open_image
        self._offload = learner.offload
        self._is_guarded = config.repeat_terminate.enabled
        self._names = tuple(names)
        cap = decode_batch_size * vllm.tensor_parallel_size  # decode_batch_size sequences for each of its devices
        self.engine_spec = EngineSpec(
            vllm,
            config.repeat_terminate,
            model=learner.checkpoint,
            cap=cap if vllm.max_num_seqs is None else min(cap, vllm.max_num_seqs),
            holds_names=bool(names),
        )
        self.pusher = ColocatedPusher(learner.weights, vllm.sync)
        self.engine: Any = None
        self._num_fallbacks = 0  # since the metrics were last taken
        self._borrowed = ExitStack()
        self._version = 0
        self._seeds: dict[str, list[int]] = {}

    def generate(
        self, requests: Sequence[RolloutRequest], seeds: Seeds, on_answer: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """One round, as :meth:`generate_window` answers it, in the order of the requests."""
        return collect_in_order(self.generate_window([RolloutRound(tuple(requests), seeds)]), on_answer)

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """Every request is a call of its own to the engine, with its own seed. Collective where T > 1.

        Images are opened in another thread, while earlier requests are answered.
        """
        if self.engine is None:
            raise RolloutError("the colocated engine has no weights yet; call sync_weights before asking it")
        wanted = [
            _Wanted(
                distributed.rank(),
                r,
                i,
                one.seeds.seed_of(i),
                request.sample_id,
                str(request.image),
                _grid_of(request),
                request.prompt_token_ids,
            )
            for r, one in enumerate(rounds)
            for i, request in enumerate(one.requests)
        ]
        self._seeds = {str(one.seeds.micro_step_idx): [one.seeds.seed_of(i) for i in range(len(one.requests))]
                       for one in rounds}  # fmt: skip
        by_id = {one.request_id: one for one in wanted}
        answered = 0
        for output in self.engine.run([self._prompt(one) for one in self._of_group(wanted)], self._lora_request()):
            one = by_id.get(output.request_id)
            if one is not None:
                answered += 1
                request = rounds[one.round_idx].requests[one.index]
                yield IndexedRollout(one.round_idx, one.index, self._rollout(request, output))
        if answered != len(wanted):
            raise RolloutError(
                f"the colocated vLLM engine gave {answered} answers to {len(wanted)} requests; {ENGINE_AT_FAULT}"
            )

    @property
    def batch_size(self) -> int:
        return self._decode_batch_size

    def sync_weights(self, version: int) -> None:
        """Move the learner away, start or wake the engine, and put the weights in."""
        try:
            self._borrowed.enter_context(self._offload())
            with distributed.raise_on_all_ranks("starting the colocated engine"):
                self._wake()
            report = self.pusher.push(version)
            self._num_fallbacks += report.fallback is not None
            with distributed.raise_on_all_ranks("waking the colocated engine"):
                self.engine.wake_up(["kv_cache"])
        except BaseException:
            self.release()
            raise
        self._version = version

    def release(self) -> None:
        """Put the engine to sleep, and the learner back."""
        try:
            if self.engine is not None:
                self.engine.sleep(self._config.sleep_level)
        finally:
            self._borrowed.close()

    def last_report(self) -> Mapping[str, Any]:
        """Seeds, caps, weights and fallbacks of the last round."""
        return {
            "backend": "vllm",
            "mode": "colocate",
            "weight_version": self._version,
            "sync_mode": self.pusher.mode,
            "fallbacks": list(self.pusher.fallbacks),
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "decode_batch_size": self._decode_batch_size,
            "cap": self.engine_spec.cap,
            "decoding": asdict(self._options),
            "seeds": self._seeds,
        }

    def take_metrics(self) -> Mapping[str, float]:
        """Counters since the last call, and whether the repeat guard is on."""
        taken, self._num_fallbacks = self._num_fallbacks, 0
        fallbacks = {"rollout/sync_fallbacks_total": float(taken)} if taken else {}
        return {"rollout/repeat_terminate_active": float(self._is_guarded), **fallbacks}

    def close(self) -> None:
        """End the engine and its processes."""
        self._borrowed.close()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def _wake(self) -> None:
        if self.engine is None:
            self.engine = self.pusher.engine = self.engine_spec.start()
        else:
            self.engine.wake_up(["weights"])

    def _of_group(self, own: Sequence[_Wanted]) -> list[_Wanted]:
        """The requests of all ranks that share this rank's engine, in one order on all of them."""
        size = self._config.tensor_parallel_size
        if size == 1:
            return list(own)
        first = distributed.rank() // size * size
        parts = distributed.gather_json([asdict(one) for one in own])[first : first + size]
        return [_Wanted(**one) for part in parts for one in part]

    def _prompt(self, wanted: _Wanted) -> Any:
        # vLLM takes one placeholder per image and expands it itself; the result is compared afterwards.
        ids = [
            token
            for token, run in groupby(wanted.prompt_token_ids)
            for token in ([token] if token == self._image_token_id else run)
        ]
        open_image = partial(self._open_image, Path(wanted.image))
        return Prompt(
            wanted.request_id, wanted.sample_id, ids, open_image, wanted.image_grid_thw, self._sampling(wanted)
        )

    def _sampling(self, wanted: _Wanted) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options, guarded = self._options, self._is_guarded
        extra: dict[str, Any] = {REQUEST_KEY: wanted.request_id} if guarded else {}
        if self._names:
            extra[NAMES_KEY] = list(self._names)
        arguments: dict[str, Any] = {"extra_args": extra} if extra else {}
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
        where = f"the colocated vLLM engine, {request.sample_id}"
        if len(completion.token_ids) > self._options.max_new_tokens:
            raise RolloutError(
                f"{where}: the answer has {len(completion.token_ids)} tokens, and rollout_matching.max_new_tokens is "
                f"{self._options.max_new_tokens}; {ENGINE_AT_FAULT}"
            )
        answer = response_tokens(completion.token_ids, completion.finish_reason, self._vocab, where)
        return Rollout(
            sample_id=request.sample_id,
            prompt_token_ids=tuple(output.prompt_token_ids),
            response_token_ids=answer.token_ids,
            text=self._vocab.decode(answer.token_ids),
            truncated=answer.truncated,
            repeat_terminated=answer.ended and self._was_guarded(output.request_id),
            weight_version=self._version,
        )

    def _was_guarded(self, request_id: str) -> bool:
        if not self._is_guarded:
            return False
        return bool(self.engine.ask_worker(lambda worker: worker.coordexp_pop_triggers([request_id])))

    def _lora_request(self) -> Any:
        if self.pusher.mode != "adapter":
            return None
        from vllm.lora.request import LoRARequest

        from coordexp.engine.worker import ADAPTER_ID, ADAPTER_NAME, ADAPTER_PATH

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_PATH)


def _grid_of(request: RolloutRequest) -> list[int] | None:
    grid = request.model_inputs.get("image_grid_thw")
    return None if grid is None else grid.flatten().tolist()
