"""The optimizer: a learning rate for each part of the model, weight decay where it belongs, and float32 master weights.

A bfloat16 weight of 1 moves by 1/256 or not at all, so smaller updates are lost, however many there are. A master
weight accumulates them, and the weight is the rounded master.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import SchedulerType

from coordexp import distributed
from coordexp.checkpoints.folder import Part, part_of
from coordexp.config.environment import SCHEDULES_BY_METRIC
from coordexp.config.schema import TrainingConfig
from coordexp.errors import CheckpointError, ConfigError

_ORDER: tuple[Part, ...] = ("llm", "aligner", "vit", "coord")  # the first group's rate is the one that is logged


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Peak learning rates; None takes ``base``. ``coord``: the coordinate rows' offsets of LoRA runs."""

    base: float
    vit: float | None = None
    aligner: float | None = None
    coord: float | None = None

    @classmethod
    def of(cls, training: TrainingConfig) -> LearningRates:
        """Those of the section ``training``."""
        return cls(training.learning_rate, training.vit_lr, training.aligner_lr, training.coord_lr)

    def rate_of(self, part: Part) -> float:
        """The rate of one part of the model: its own, or the base rate."""
        own = None if part == "llm" else getattr(self, part)
        return self.base if own is None else own

    @property
    def differ(self) -> bool:
        """Whether any part learns at another rate than the rest."""
        return len({self.rate_of(part) for part in _ORDER}) > 1


def parameter_groups(
    model: torch.nn.Module, rates: LearningRates, weight_decay: float, decaying: Collection[str]
) -> list[dict[str, Any]]:
    """Trainable parameters by part, each part's decaying ones before the others; empty groups are left out.

    ``decaying`` are the names that transformers decays: all but biases and norms. DoRA's magnitudes are scales as norms
    are, and coordinate offsets are rows of a table whose decay would pull trained coordinates back to the untrained
    ones: neither decays.
    """
    groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {
        (part, decays): [] for part in _ORDER for decays in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part = part_of(name)
            decays = name in decaying and part != "coord" and "lora_magnitude_vector" not in name
            groups[part, decays].append(parameter)
    return [
        {
            "name": f"{part}" if decays else f"{part}, no decay",
            "params": parameters,
            "lr": rates.rate_of(part),
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (part, decays), parameters in groups.items()
        if parameters
    ]


def build_optimizer(
    model: torch.nn.Module, args: TrainingArguments, rates: LearningRates, *, master_weights: bool
) -> torch.optim.Optimizer:
    """The optimizer that ``args.optim`` names, over our parameter groups: each part of the model has its own learning
    rate. ``master_weights``: it steps float32 copies of the weights."""
    # Weight decay as in transformers: all but biases and norms.
    never = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    groups = parameter_groups(model, rates, args.weight_decay, get_parameter_names(model, [torch.nn.LayerNorm], never))
    optimizer_class, given = Trainer.get_optimizer_cls_and_kwargs(args, model)  # pyright: ignore[reportArgumentType]
    if master_weights:
        optimizer_class = with_master_weights(optimizer_class)
    optimizer = optimizer_class(groups, **given)
    if given.get("optim_bits") == 8:
        _keep_tables_in_32_bits(model)
    if isinstance(optimizer, MasterWeights):
        if distributed.world_size() == 1:
            optimizer.sum_in_float32()
    else:
        refuse_master_weights(optimizer)
    return optimizer


def _keep_tables_in_32_bits(model: torch.nn.Module) -> None:
    # As transformers' Trainer does: a row of an embedding gets few and large updates, which 8-bit states store badly.
    manager: Any = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def build_scheduler(optimizer: Any, args: TrainingArguments, max_steps: int) -> Any:
    """The learning-rate schedule that ``args.lr_scheduler_type`` names, over ``max_steps`` steps."""
    for group in optimizer.param_groups:  # most schedules note it; with it, a resumed run may have another peak
        group.setdefault("initial_lr", group["lr"])
    given: Any = args.lr_scheduler_kwargs
    if args.lr_scheduler_type in SCHEDULES_BY_METRIC:
        given = {**(given or {}), "mode": "max" if args.greater_is_better else "min"}
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=given,
    )


def check_schedule(training: TrainingConfig) -> None:
    """Raise ConfigError, before the model is loaded, if the learning-rate schedule refuses its arguments."""
    name, given = training.lr_scheduler_type, training.lr_scheduler_kwargs
    if name not in [str(one.value) for one in SchedulerType]:
        return  # an unknown name is reported elsewhere
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    try:
        get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=2, scheduler_specific_kwargs=given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"training.lr_scheduler_kwargs: {given} does not fit training.lr_scheduler_type: {name} "
            f"({' '.join(str(error).split())}); write the arguments that it needs, or choose another schedule"
        ) from error


def needs_metric(scheduler: Any) -> bool:
    """Whether the schedule steps after evaluations, by their metric, and not after optimizer steps."""
    return isinstance(scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR))


STATE_KEY = "master_weights"  # in a checkpoint's optimizer state: master weights by torch's parameter number


class MasterWeights(torch.optim.Optimizer):
    """Mixin of :func:`with_master_weights`: the optimizer's parameters are float32 copies of the model's.

    Forward, backward and clipping use the model's own weights and gradients. :meth:`step` copies each gradient to its
    master in float32, steps the masters, and rounds each master into its weight. Memory per parameter: 4 bytes for the
    master and 4 for its gradient, the latter only during the step, or always after :meth:`sum_in_float32`.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]], **arguments: Any) -> None:
        """``params``: groups of the model's weights; ``arguments``: the optimizer's own."""
        groups = [dict(group) for group in params]
        self._weights: list[torch.Tensor] = [weight for group in groups for weight in group["params"]]
        for group in groups:
            group["params"] = [weight.detach().to(torch.float32, copy=True) for weight in group["params"]]
        super().__init__(groups, **arguments)
        self._sums: torch.dtype | None = None  # the type of gradients' sums; None: the weights' own

    def sum_in_float32(self) -> None:
        """Let autograd accumulate gradients of several backward passes in float32. Not under DDP, which exchanges
        gradients in the weights' type and refuses others."""
        self._sums = torch.float32
        for weight in self._weights:
            weight.grad_dtype = self._sums

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the masters. Weights without a gradient do not change."""
        moved = [(master, weight) for master, weight in self._pairs() if weight.grad is not None]
        for master, weight in moved:
            assert weight.grad is not None and self._sums in (None, weight.grad.dtype), "sums in another type"
            master.grad = weight.grad.to(torch.float32)
        result = super().step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([weight for _, weight in moved], [master for master, _ in moved])
        for master, _ in moved:
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
        """The optimizer's state, with the masters under :data:`STATE_KEY`."""
        masters = {number: master for number, (master, _) in enumerate(self._pairs())}
        return {**super().state_dict(), STATE_KEY: masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`. Raises CheckpointError if it has no masters, if their shapes differ
        from the model's, or if the model's weights are not these masters rounded."""
        saved: Any = state_dict.get(STATE_KEY)
        if saved is None:
            raise CheckpointError(
                "the optimizer of this checkpoint has no float32 master weights: it was written with "
                "training.master_weights: null; resume with that, or start a new run from its weights"
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
                        "of different steps or number types; resume from another checkpoint, or start a new run"
                    )

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of (master, weight), in the order in which torch numbers parameters."""
        masters = (master for group in self.param_groups for master in group["params"])
        return zip(masters, self._weights, strict=True)


@cache
def with_master_weights(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of ``optimizer_class`` that steps float32 masters of the given weights."""
    return type(f"{optimizer_class.__name__}WithMasterWeights", (MasterWeights, optimizer_class), {})


def refuse_master_weights(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without master weights refuse a state that has them: it would resume from rounded weights."""

    def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if STATE_KEY in state_dict:
            raise CheckpointError(
                "the optimizer of this checkpoint has float32 master weights, and training.master_weights is null; "
                "resume with training.master_weights: float32, or start a new run from its weights"
            )

    optimizer.register_load_state_dict_pre_hook(check)
