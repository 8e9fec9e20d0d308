"""The learner's weights and optimizer in main memory while a colocated engine uses the device.

Each storage is copied to main memory and its device memory given back; the tensors read the copy meanwhile, so weights
can still be pushed from them. Afterwards every storage is filled again and every tensor reads its own again: the same
objects, bits, sharing and device, also when the rollouts fail. Nothing that lives in main memory already is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from coordexp.config.rollout import OffloadConfig, RolloutMatchingConfig
from coordexp.errors import ConfigError

_KEY = "rollout_matching.offload.enabled"


def lives_in_main_memory(tensor: torch.Tensor) -> bool:
    """Whether moving this tensor out of the device's way would gain nothing."""
    return tensor.device.type == "cpu"


class LearnerOffload:
    """Moves one learner process's model and/or optimizer out of the way. Only between optimizer steps: whatever an
    unfinished backward pass holds would point at freed memory."""

    def __init__(
        self, model: Any, config: OffloadConfig, stays: Callable[[torch.Tensor], bool] = lives_in_main_memory
    ) -> None:
        self._model = model
        self._offload_model = config.offload_model
        self._offload_optimizer = config.offload_optimizer
        self._stays = stays
        self._optimizer: Callable[[], Any] = lambda: None
        self._is_away = False

    def bind(self, optimizer: Callable[[], Any], sharded_by: str | None) -> None:
        """Say where the optimizer will be (it is made when training starts), and who else owns the weights.

        Raises:
            ConfigError: DeepSpeed or FSDP keeps weights and optimizer in buffers of its own.
        """
        if sharded_by is not None:
            raise _owned_by(sharded_by)
        self._optimizer = optimizer

    @contextmanager
    def away(self) -> Iterator[None]:
        """The context around a colocated engine's start, weight pushes and answers."""
        assert not self._is_away, "the learner is away already"
        assert all(p.grad is None for p in self._model.parameters()), "offload in the middle of an optimizer step"
        with ExitStack() as restored:
            restored.callback(setattr, self, "_is_away", False)
            self._is_away = True
            for storage in _by_storage(tensor for tensor in self._tensors() if not self._stays(tensor)):
                restored.enter_context(_in_main_memory(storage))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # an engine measures what is free on the device, not in torch's cache
            yield

    def _tensors(self) -> Iterator[torch.Tensor]:
        if self._offload_model:
            yield from self._model.parameters()
        if self._offload_optimizer:
            of_model = {id(parameter) for parameter in self._model.parameters()}
            yield from (tensor for tensor in held_by(self._optimizer()) if id(tensor) not in of_model)


def build_offload(model: Any, rollout: RolloutMatchingConfig) -> LearnerOffload | None:
    """The offload that ``rollout`` asks for; None where nothing is colocated, or nothing is to move.

    Raises:
        ConfigError: the process was launched under DeepSpeed or FSDP.
    """
    if not (rollout.is_colocated and rollout.offload.enabled):
        return None
    for variable, owner in (("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")):
        if os.environ.get(variable, "").lower() in ("1", "true"):  # set by `accelerate launch`
            raise _owned_by(owner)
    return LearnerOffload(model, rollout.offload)


def _owned_by(owner: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}: {owner} owns the learner's weights and optimizer and keeps them in buffers of its own, so they "
        f"cannot be moved away. Set offload.enabled: false, or {owner}'s own CPU offload; or write rollout_backend: hf "
        "or vllm.mode: server, which need no room on the learner's device"
    )


def held_by(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer steps, which may be the model's own, and those of its state."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that share memory, together: it is moved once."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _owned_by(type(tensor).__name__)
        groups.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


@contextmanager
def _in_main_memory(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Let ``tensors``, which share one storage, read a copy of it in main memory; free the storage meanwhile."""
    home = tensors[0].untyped_storage()
    size = home.nbytes()
    views = [tensor.data for tensor in tensors]  # they keep the storage, and their place in it
    away = torch.empty(size, dtype=torch.uint8, pin_memory=home.device.type == "cuda").untyped_storage()
    away.copy_(home)
    home.resize_(0)
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = torch.empty(0, dtype=view.dtype).set_(away, view.storage_offset(), view.shape, view.stride())
    try:
        yield
    finally:
        home.resize_(size)
        home.copy_(away)
        for tensor, view in zip(tensors, views, strict=True):
            tensor.data = view
