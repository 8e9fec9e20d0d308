"""Move the trainer's weights and optimizer to main memory while a colocated engine uses the device.

Each storage is copied to main memory and resized to zero, and refilled afterwards, also when the rollouts fail. The
tensors stay the same objects on the same storage throughout: assigning to ``tensor.data`` across devices would make
torch drop the parameter's gradient accumulator, on which DDP has its hooks, and gradients would silently no longer be
exchanged between processes. Weight pushes read the copies through :meth:`TrainerOffload.current`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from coordexp.config.rollout import OffloadConfig, RolloutMatchingConfig
from coordexp.errors import ConfigError

MOVABLE = (torch.Tensor, torch.nn.Parameter)  # not their subclasses, whose data may be elsewhere


@dataclass(eq=False)
class TrainerOffload:
    """Moves one trainer process's model and/or optimizer. Only between optimizer steps: an unfinished backward pass
    would read freed memory. ``stays``: whether moving a tensor would free no device memory. ``optimizer`` returns the
    optimizer, which exists only once training starts."""

    model: Any
    config: OffloadConfig
    stays: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type == "cpu"
    optimizer: Callable[[], Any] = lambda: None
    is_away: bool = field(default=False, init=False)
    _copies: dict[int, torch.Tensor] = field(default_factory=dict, init=False)  # by id of the tensor that was moved

    @contextmanager
    def away(self) -> Iterator[None]:
        """The context around a colocated engine's start, weight pushes and answers."""
        assert not self.is_away, "the trainer is away already"
        assert all(p.grad is None for p in self.model.parameters()), "offload in the middle of an optimizer step"
        with ExitStack() as restored:
            restored.callback(setattr, self, "is_away", False)
            self.is_away = True
            for tensors in _by_storage(tensor for tensor in self._tensors() if not self.stays(tensor)):
                restored.enter_context(self._in_main_memory(tensors))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # an engine measures what is free on the device, not in torch's cache
            yield

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that holds the values of ``tensor`` now: its copy while it is away, else itself."""
        return self._copies.get(id(tensor), tensor)

    def _tensors(self) -> Iterator[torch.Tensor]:
        if self.config.offload_model:
            yield from self.model.parameters()
        if self.config.offload_optimizer:
            of_model = {id(parameter) for parameter in self.model.parameters()}
            yield from (tensor for tensor in held_by(self.optimizer()) if id(tensor) not in of_model)

    @contextmanager
    def _in_main_memory(self, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Copy the one storage that ``tensors`` share and free it; refill it at the end."""
        home = tensors[0].untyped_storage()
        size = home.nbytes()
        away = torch.empty(size, dtype=torch.uint8, pin_memory=home.device.type == "cuda").untyped_storage()
        away.copy_(home)
        for one in tensors:
            view = torch.empty(0, dtype=one.dtype).set_(away, one.storage_offset(), one.shape, one.stride())
            self._copies[id(one)] = view
        home.resize_(0)
        try:
            yield
        finally:
            for one in tensors:
                del self._copies[id(one)]
            home.resize_(size)
            home.copy_(away)


def build_offload(model: Any, rollout: RolloutMatchingConfig) -> TrainerOffload | None:
    """The offload that ``rollout`` configures; None if there is none. The configuration refuses it with DeepSpeed and
    FSDP, which own the weights and the optimizer."""
    return TrainerOffload(model, rollout.offload) if rollout.is_colocated and rollout.offload.enabled else None


def held_by(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer steps, which may be the model's own, and those of its state."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors grouped by the storage they share, which is moved once."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor) not in MOVABLE:
            raise ConfigError(
                f"rollout_matching.offload.enabled: the model or its optimizer has a {type(tensor).__name__}, which "
                "cannot be moved away; set offload.enabled: false, or rollout_backend: hf or vllm.mode: server, which "
                "need no room on the trainer's device"
            )
        groups.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]
