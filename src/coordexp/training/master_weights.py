"""bfloat16 weights whose float32 masters the optimizer keeps and steps.

A weight of 1 in bfloat16 moves by 1/256 or not at all, so an update that is smaller is lost, however often it comes. A
master takes it, and the weight becomes the master, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from coordexp.errors import CheckpointError

STATE_KEY = "master_weights"  # of the optimizer's state in a checkpoint: masters by their number, as torch counts


class MasterWeights(torch.optim.Optimizer):
    """What :func:`with_master_weights` adds to an optimizer: its parameters are float32 copies of the model's.

    Forward, backward and clipping see the model's own weights and gradients; :meth:`step` gives each master its
    weight's gradient in float32, and each weight its master, rounded to nearest. Memory in bytes a parameter: 4 for the
    master and 4 for its gradient: while a step is taken or, after :meth:`sum_in_float32`, instead of the weight's 2.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]], **arguments: Any) -> None:
        """``params``: groups of the model's weights; ``arguments``: the optimizer's own."""
        groups = [dict(group) for group in params]
        self._weights: list[torch.Tensor] = [weight for group in groups for weight in group["params"]]
        for group in groups:
            group["params"] = [weight.detach().to(torch.float32, copy=True) for weight in group["params"]]
        super().__init__(groups, **arguments)
        self._sums: torch.dtype | None = None  # what gradients are summed in; None: in the weights' own type

    def sum_in_float32(self) -> None:
        """From now on let autograd add up the gradients of several backward passes in float32, each as it comes. Not
        under DDP, which exchanges gradients in the weights' type and refuses others."""
        self._sums = torch.float32
        for weight in self._weights:
            weight.grad_dtype = self._sums

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the masters; weights without a gradient stay."""
        moved = [(master, weight) for master, weight in self._pairs() if weight.grad is not None]
        for master, weight in moved:
            assert weight.grad is not None and self._sums in (None, weight.grad.dtype), "sums in another type"
            master.grad = weight.grad.to(torch.float32)
        result = super().step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
        with torch.no_grad():
            for master, weight in moved:
                weight.copy_(master)
                master.grad = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's weights; masters have none between steps."""
        for weight in self._weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the masters under :data:`STATE_KEY`."""
        masters = {number: master for number, (master, _) in enumerate(self._pairs())}
        return {**super().state_dict(), STATE_KEY: masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, in an optimizer of the same weights.

        Raises:
            CheckpointError: no masters in it, masters of other weights, or of the same ones at another step.
        """
        saved: Any = state_dict.get(STATE_KEY)
        if saved is None:
            raise CheckpointError(
                "the optimizer of this checkpoint has no float32 master weights: it was written with "
                "training.master_weights: null; resume with that, or start anew from its weights"
            )
        shapes = {number: master.shape for number, (master, _) in enumerate(self._pairs())}
        if {number: master.shape for number, master in saved.items()} != shapes:
            raise CheckpointError("the checkpoint's master weights are of other weights; resume with the same tuner")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        with torch.no_grad():
            for number, (master, weight) in enumerate(self._pairs()):
                master.copy_(saved[number])
                if not torch.equal(weight, master.to(weight.dtype)):
                    raise CheckpointError(
                        "the checkpoint's weights are not its master weights, rounded: its model and its optimizer are "
                        "of different steps or number types; resume from another checkpoint, or start anew"
                    )

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each master with its weight, in the order in which torch counts parameters."""
        masters = (master for group in self.param_groups for master in group["params"])
        return zip(masters, self._weights, strict=True)


@cache
def with_master_weights(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """``optimizer_class``, stepping float32 masters of the weights that it is given."""
    return type(f"{optimizer_class.__name__}WithMasterWeights", (MasterWeights, optimizer_class), {})


def refuse_master_weights(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that keeps no masters refuse a state that has some: it would go on from rounded weights."""

    def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if STATE_KEY in state_dict:
            raise CheckpointError(
                "the optimizer of this checkpoint holds float32 master weights, and training.master_weights is null; "
                "resume with training.master_weights: float32, or start anew from its weights"
            )

    optimizer.register_load_state_dict_pre_hook(check)
