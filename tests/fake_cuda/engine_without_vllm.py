"""In place of vLLM: an engine in the trainer's process that takes weights as vLLM's worker does, and always gives the
same answer. Real are the backend, the pusher, the receiver and the offload around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.folder import Checkpoint
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import serialize_objects
from coordexp.engine.trainer.colocated import ColocatedBackend, Prompt
from coordexp.records import GTObject
from coordexp.rollouts.backend import RolloutBackend, TrainerParts, decoding_options
from coordexp.weight_sync.receiver import WeightReceiver

WRITTEN = (GTObject("red circle", "bbox_2d", (100, 100, 300, 300)),)
PATCHES_PER_TOKEN = 4


class ModelWithoutVLLM(torch.nn.Module):
    """The checkpoint's weights, under its own names."""

    def __init__(self, checkpoint: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shapes = weight_shapes(Checkpoint.open(checkpoint))
        self._weights = {
            name: torch.nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=device), requires_grad=False)
            for name, shape in shapes.items()
        }

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._weights.items()

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._weights[name].data.copy_(tensor)


class EngineWithoutVLLM:
    """The methods of :class:`coordexp.engine.trainer.colocated.InProcessEngine` that backend and pusher call."""

    def __init__(self, trainer: TrainerParts) -> None:
        device = next(trainer.model.parameters()).device
        answer = trainer.vocab.encode_answer(serialize_objects(WRITTEN))
        self._answer = [*answer, trainer.vocab.eos_id]
        self._image_token_id = trainer.image_token_id
        self.model = ModelWithoutVLLM(trainer.checkpoint, torch.bfloat16, device)
        self._worker = SimpleNamespace(
            model_runner=SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16)),
            receiver=WeightReceiver(self.model, device, sharded=False),
            coordexp_pop_triggers=lambda request_ids: [],
        )
        self.pushes = self.slept = 0

    def commit(self, version: int, *, wants_checksum: bool) -> dict[str, Any]:
        self.pushes += 1
        return self._worker.receiver.commit(version, wants_checksum, lambda: None)

    def ask_worker(self, question: Callable[[Any], Any]) -> Any:
        return question(self._worker)

    def run(
        self,
        prompts: Sequence[Prompt],
        open_image: Callable[[Any], Any],
        sampling_of: Callable[[Prompt], Any],
        lora_request: Any = None,
    ) -> Iterator[Any]:
        for prompt in prompts:
            yield SimpleNamespace(
                finished=True,
                request_id=prompt.request_id,
                prompt_token_ids=self._expanded(prompt),
                outputs=[SimpleNamespace(token_ids=self._answer, finish_reason="stop")],
            )

    def sleep(self, level: int) -> None:
        self.slept += 1

    def wake_up(self, parts: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def _expanded(self, prompt: Prompt) -> list[int]:
        assert prompt.image_grid_thw is not None
        frames, height, width = prompt.image_grid_thw
        placeholders = frames * height * width // PATCHES_PER_TOKEN
        return [
            token
            for one in prompt.token_ids
            for token in ([one] * placeholders if one == self._image_token_id else [one])
        ]


class BackendWithoutVLLM(ColocatedBackend):
    """Colocated vLLM with its engine replaced."""

    def start_engine(self) -> Any:
        return EngineWithoutVLLM(self._trainer)


def build_backend(config: RolloutMatchingConfig, trainer: TrainerParts, names: Sequence[str] = ()) -> RolloutBackend:
    """As :func:`coordexp.engine.trainer.backends.build_backend`, without vLLM in this process."""
    if not config.is_colocated:
        from coordexp.engine.trainer.backends import build_backend as real

        return real(config, trainer, names)
    vllm = config.vllm.model_copy(update={"tensor_parallel_size": 1})
    return BackendWithoutVLLM(config.model_copy(update={"vllm": vllm}), trainer, decoding_options(config), names)


def use_of(backend: Any) -> Mapping[str, int]:
    """How often weights were pushed to the engine, and how often it slept; empty without one."""
    engine = getattr(backend, "engine", None)
    return {} if engine is None else {"pushes": engine.pushes, "slept": engine.slept}
