"""Each part has its own rate; bfloat16 weights with float32 masters learn the same as float32 weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Trainer

from coordexp.checkpoints.folder import part_of
from coordexp.config.schema import TunerConfig
from coordexp.errors import CheckpointError
from coordexp.modeling.adapter import tune
from coordexp.training.optimizer import LearningRates, build_optimizer, parameter_groups, with_master_weights
from support.tiny_run import (
    forget_configuration,
    load_tiny,
    run_config,
    same_weights,
    step_lines,
    tiny_checkpoint,
    train,
    weights,
)
from support.tuned_models import lora
from unit.training.test_resume import WAITING, Killed, figures, kill_at

BF16: dict[str, Any] = {"model__dtype": "bfloat16", "training__bf16": True}
MASTERS: dict[str, Any] = BF16 | {"training__master_weights": "float32"}


def optimizer_of(values: list[float], kind: Any = torch.optim.SGD, **arguments: Any) -> tuple[torch.Tensor, Any]:
    weight = torch.nn.Parameter(torch.tensor(values, dtype=torch.bfloat16))
    return weight, with_master_weights(kind)([{"params": [weight], "lr": 1.0}], **arguments)


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]


@given(updates=st.lists(st.floats(-(2.0**-10), 2.0**-10, width=16), min_size=1, max_size=200))
def test_masters_sum_updates_in_float32_and_weights_are_rounded_masters(updates: list[float]) -> None:
    """Each update is too small for a bfloat16 weight of 1."""
    weight, optimizer = optimizer_of([1.0])
    expected = torch.ones(1)
    for update in updates:
        weight.grad = torch.full_like(weight, -update)
        expected = expected + weight.grad.float() * -1.0
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
    assert torch.equal(masters_of(optimizer)[0], expected)
    assert torch.equal(weight.detach(), expected.bfloat16())


@given(gradients=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=100))
def test_gradients_of_many_rows_are_summed_in_float32(gradients: list[float]) -> None:
    """In bfloat16, 256 plus anything below 1 is 256."""
    weight, optimizer = optimizer_of([1.0])
    optimizer.sum_in_float32()
    rows = torch.tensor([256.0, *gradients]).bfloat16()
    for _ in range(2):  # the second step begins at nothing
        start, expected = masters_of(optimizer)[0].clone(), torch.zeros(1)
        for row in rows:
            (weight * row).sum().backward()
            expected = expected + row.float()
        assert weight.grad is not None and torch.equal(weight.grad, expected)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(masters_of(optimizer)[0], start - expected)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_equal_the_same_optimizer_on_float32_weights(kind: Any) -> None:
    arguments: dict[str, Any] = {"weight_decay": 0.1, "lr": 1e-3}
    weight, optimizer = optimizer_of([1.0, -2.0, 0.5], kind, **arguments)
    plain = torch.nn.Parameter(weight.detach().float())
    reference = kind([{"params": [plain], "lr": 1.0}], **arguments)
    for step in range(5):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-3 * step  # as a schedule sets it
        weight.grad = torch.tensor([0.1, -0.2, step], dtype=torch.bfloat16)
        plain.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(masters_of(optimizer)[0], plain.detach())


def test_a_weight_without_a_gradient_is_unchanged() -> None:
    weight, optimizer = optimizer_of([1.0], torch.optim.AdamW, weight_decay=0.5)
    optimizer.step()
    assert weight.item() == 1.0 and masters_of(optimizer)[0].item() == 1.0


def test_a_state_of_other_weights_is_refused() -> None:
    _, optimizer = optimizer_of([1.0, 2.0])
    for values, message in (([1.0, 2.5], "not its master weights, rounded"), ([1.0], "are of other weights")):
        with pytest.raises(CheckpointError, match=message):
            optimizer_of(values)[1].load_state_dict(optimizer.state_dict())


# -- in training -------------------------------------------------------------------------------------------------------


def losses(trainer: Any) -> torch.Tensor:
    return torch.tensor([line["loss"] for line in step_lines(trainer)])


SMALL_STEPS: dict[str, Any] = {
    "training__optim": "adamw_torch_fused", "training__max_steps": 30, "training__learning_rate": 3e-5,
    "training__vit_lr": 1e-5, "training__weight_decay": 0.1, "training__gradient_accumulation_steps": 2,
    "training__max_grad_norm": 0.5, "training__logging_steps": 1,
}  # fmt: skip


def cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    flat_a, flat_b = (torch.cat([one[name].flatten() for name in sorted(a)]) for one in (a, b))
    return float(torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=0))


def test_it_trains_like_float32_and_plain_bfloat16_does_not(tmp_path: Path) -> None:
    """Thirty steps, clipped and accumulated, with updates too small for most bfloat16 weights. From float32
    weights under autocast the curve differs by less than 0.02, an eighth of what is learned; without masters by more
    than a third of it."""
    start = weights(load_tiny().model)
    curves: dict[str, torch.Tensor] = {}
    ways: dict[str, dict[str, torch.Tensor]] = {}
    for name, keys in {"float32": {"training__bf16": True}, "masters": MASTERS, "plain": BF16}.items():
        trainer = train(run_config(tmp_path, 1, name, **SMALL_STEPS, **keys))
        curves[name] = losses(trainer)
        named = dict(trainer.model.named_parameters())
        if name == "masters":
            assert {weight.dtype for weight in named.values()} == {torch.bfloat16}
            assert sorted(map(torch.numel, masters_of(trainer.run.optimizer))) == sorted(
                map(torch.numel, named.values())
            )
        ways[name] = {key: weight.detach().float() - start[key] for key, weight in named.items()}
    learned = float(curves["float32"][0] - curves["float32"][-1])
    gaps = {name: float((curve - curves["float32"]).abs().max()) for name, curve in curves.items()}
    assert learned > 0.16 and gaps["masters"] < 0.02 and gaps["plain"] > learned / 3
    assert cosine(ways["masters"], ways["float32"]) > 0.99 and cosine(ways["plain"], ways["float32"]) < 0.75


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Masters travel in the checkpoint's optimizer; its model is stored as model.dtype says."""
    keys = WAITING | MASTERS | {"training__gradient_accumulation_steps": 2, "training__learning_rate": 1e-4}
    whole = train(run_config(tmp_path, 1, "whole", **keys))
    config = run_config(tmp_path, 1, "killed", training__resume_from_checkpoint=True, **keys)
    with pytest.raises(Killed):
        train(config, on_built=kill_at(5))
    saved = tmp_path / "killed" / "checkpoint-4"
    assert {value.dtype for value in load_file(saved / "model.safetensors").values()} == {torch.bfloat16}
    resumed = train(config)
    assert figures(resumed) == figures(whole)
    assert same_weights(weights(resumed.model), weights(whole.model))
    pairs = zip(masters_of(resumed.run.optimizer), masters_of(whole.run.optimizer), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    unrounded = [
        master for master in masters_of(whole.run.optimizer) if not torch.equal(master, master.bfloat16().float())
    ]
    assert unrounded, "no master held more than its weight, so nothing was tested"


def test_a_steps_gradient_is_the_float32_sum_of_its_rows(tmp_path: Path) -> None:
    """It is what the optimizer steps by; bfloat16 could not hold it."""
    rows: dict[str, list[torch.Tensor]] = {}
    sums: dict[str, torch.Tensor] = {}

    def watch(trainer: Any) -> None:
        named = dict(trainer.model.named_parameters())
        for name, weight in named.items():
            rows[name] = []
            weight.register_hook(lambda gradient, name=name: rows[name].append(gradient.clone()))
        trainer.run.optimizer.optimizer.register_step_pre_hook(
            lambda *_: sums.update({name: weight.grad.clone() for name, weight in named.items()})
        )

    keys = MASTERS | {"training__max_steps": 1, "training__max_grad_norm": 0.0}
    train(run_config(tmp_path, 1, "run", training__gradient_accumulation_steps=3, **keys), on_built=watch)
    for name, gradients in rows.items():
        assert len(gradients) >= 3
        expected = torch.zeros_like(sums[name], dtype=torch.float32)
        for gradient in gradients:
            expected += gradient
        assert sums[name].dtype == torch.float32 and torch.equal(sums[name], expected)
    assert not all(torch.equal(total, total.bfloat16().float()) for total in sums.values())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (MASTERS, BF16, "resume with training.master_weights: float32"),
        (BF16, MASTERS, "written with training.master_weights: null; resume with that"),
    ],
)
def test_resume_requires_masters_exactly_where_they_were_saved(
    before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saving: dict[str, Any] = {"training__save_strategy": "steps", "training__save_steps": 1, "training__max_steps": 1}
    train(run_config(tmp_path, 1, "run", **saving, **before))
    forget_configuration(tmp_path / "run")
    going_on = saving | {"training__max_steps": 2, "training__resume_from_checkpoint": True}
    with pytest.raises(CheckpointError, match=message):
        train(run_config(tmp_path, 1, "run", **going_on, **after))


# -- each part of the model is its own parameter group -----------------------------------------------------------------

RATES = LearningRates(base=1e-4, vit=1e-6, aligner=2e-4, coord=5e-3)


def groups_of(config: TunerConfig, rates: LearningRates = RATES) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    loaded = load_tiny()
    tune(loaded.model, config, loaded.vocab.coord_token_ids)
    decaying = Trainer.get_decay_parameter_names(None, loaded.model)  # type: ignore[arg-type]
    return loaded.model, parameter_groups(loaded.model, rates, 0.1, decaying)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    for config in (TunerConfig(), TunerConfig(freeze_vit=True), lora(use_dora=True)):
        model, groups = groups_of(config)
        grouped_ids = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(grouped_ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_learning_rates_and_decay_by_part() -> None:
    model, groups = groups_of(lora(use_dora=True))
    table = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert table == {
        "llm": (1e-4, 0.1), "llm, no decay": (1e-4, 0.0),  # DoRA's magnitudes do not decay
        "aligner": (2e-4, 0.1), "aligner, no decay": (2e-4, 0.0),
        "vit": (1e-6, 0.1), "vit, no decay": (1e-6, 0.0),
        "coord, no decay": (5e-3, 0.0),
    }  # fmt: skip
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        assert {part_of(names[id(p)]) for p in group["params"]} == {group["name"].split(",")[0]}


def test_weight_decay_is_applied_as_in_transformers() -> None:
    model, groups = groups_of(TunerConfig())
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert decayed == theirs - {"lm_head.weight"}  # the tied table, once
    assert not any("norm" in name or name.endswith("bias") for name in decayed)


SGD: dict[str, Any] = {"training__optim": "sgd", "training__max_grad_norm": 0.0, "training__max_steps": 1,
                       "training__learning_rate": 0.01}  # fmt: skip


def test_one_step_changes_each_part_by_its_own_rate(tmp_path: Path) -> None:
    """Plain SGD: with the same gradient, twice the rate is twice the way."""
    start = weights(load_tiny().model)
    same = weights(train(run_config(tmp_path, 1, "same", **SGD)).model)
    keys = {"training__vit_lr": 0.0, "training__aligner_lr": 0.02}
    trained = train(run_config(tmp_path, 1, "own", **SGD, **keys))
    assert [line["learning_rate"] for line in trained.state.log_history if "learning_rate" in line] == [0.01], (
        "the language model's rate is logged"
    )
    own = weights(trained.model)
    factor = {"vit": 0.0, "aligner": 2.0, "llm": 1.0}
    moved: dict[str, float] = dict.fromkeys(factor, 0.0)
    for name, value in start.items():
        part = part_of(name)
        torch.testing.assert_close(own[name] - value, factor[part] * (same[name] - value), atol=1e-6, rtol=1e-3)
        moved[part] = max(moved[part], float((same[name] - value).abs().max()))
    assert min(moved.values()) > 1e-5, "every part must have a gradient for this test"


def test_coordinate_rows_have_their_own_rate(tmp_path: Path) -> None:
    keys = SGD | {"tuner__train_type": "lora", "tuner__lora_dropout": 0.0}
    offsets = []
    for name, rate in (("base", None), ("triple", 0.03)):
        model = train(run_config(tmp_path, 1, name, **keys, training__coord_lr=rate)).model
        offsets.append(model.get_input_embeddings().coord_offset.detach().clone())
        assert model.name_or_path == str(tiny_checkpoint())
    assert offsets[0].abs().max() > 1e-5
    torch.testing.assert_close(offsets[1], 3 * offsets[0], atol=1e-9, rtol=1e-4)


def test_the_fused_optimizer_of_the_shipped_configurations_steps_as_the_plain_one(tmp_path: Path) -> None:
    ways = {}
    for optim in ("adamw_torch", "adamw_torch_fused"):
        keys = {"training__optim": optim, "training__vit_lr": 1e-4, "training__weight_decay": 0.1}
        ways[optim] = train(run_config(tmp_path, 1, optim, training__max_steps=3, **keys))
    assert type(ways["adamw_torch_fused"].run.optimizer.optimizer).__name__ == "AdamW"
    assert ways["adamw_torch_fused"].run.optimizer.param_groups[0]["fused"]
    plain, fused = (weights(trainer.model) for trainer in ways.values())
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_optimizers_with_8_bit_states_keep_32_bits_for_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' Trainer; here with a package that only notes its arguments."""
    kept: list[tuple[Any, str, dict[str, int]]] = []
    manager = SimpleNamespace(register_module_override=lambda *override: kept.append(override))
    package = SimpleNamespace(GlobalOptimManager=SimpleNamespace(get_instance=lambda: manager))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", package)

    class EightBit(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, optim_bits: int) -> None:
            super().__init__(params, lr)

    given = {"lr": 1e-3, "optim_bits": 8}
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda args, model: (EightBit, given)))
    model = load_tiny().model
    args: Any = SimpleNamespace(weight_decay=0.0)
    build_optimizer(model, args, LearningRates(1e-3), master_weights=False)
    tables = [model.get_input_embeddings(), model.model.visual.pos_embed]
    assert {id(module) for module, _, _ in kept} == {id(table) for table in tables}
    assert {(name, settings["optim_bits"]) for _, name, settings in kept} == {("weight", 32)}
