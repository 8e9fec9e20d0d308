"""Each part of the model is its own parameter group, and a real optimizer step takes each group's own rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from coordexp.checkpoints.folder import part_of
from coordexp.config.schema import TunerConfig
from coordexp.errors import ConfigError
from coordexp.modeling.adapter import tune
from coordexp.training.optimizer import LearningRates, build_optimizer, parameter_groups
from support.tiny_run import load_tiny, run_config, tiny_checkpoint, train, weights
from support.tuned_models import lora

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


def test_parts_without_a_learning_rate_use_the_base_rate() -> None:
    rates = LearningRates(3e-5)
    assert {rates.rate_of(part) for part in ("llm", "vit", "aligner", "coord")} == {3e-5} and not rates.differ
    assert LearningRates(3e-5, vit=0.0).rate_of("vit") == 0.0


def test_an_optimizer_with_its_own_groups_allows_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    own = {"params": list(model.parameters()), "lr": 0.5}
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", lambda *_: (torch.optim.SGD, own))
    args: Any = SimpleNamespace(weight_decay=0.1)
    (group,) = build_optimizer(model, args, LearningRates(1e-4), master_weights=False).param_groups
    assert group["params"] == own["params"] and group["lr"] == 0.5 and group["weight_decay"] == 0.0
    with pytest.raises(ConfigError, match=r"training\.optim: .*remove training\.vit_lr, aligner_lr and coord_lr"):
        build_optimizer(model, args, RATES, master_weights=False)


SGD: dict[str, Any] = {"training__optim": "sgd", "training__max_grad_norm": 0.0, "training__max_steps": 1,
                       "training__learning_rate": 0.01}  # fmt: skip


def test_one_step_changes_each_part_by_its_own_rate(tmp_path: Path) -> None:
    """Plain SGD: with the same gradient, twice the rate is twice the way."""
    start = weights(load_tiny().model)
    same = weights(train(run_config(tmp_path, 1, "same", **SGD)).model)
    keys = {"training__vit_lr": 0.0, "training__aligner_lr": 0.02}
    own = weights(train(run_config(tmp_path, 1, "own", **SGD, **keys)).model)
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
