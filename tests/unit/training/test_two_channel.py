"""Whole two-channel runs: the schedule, the samples of each step, bitwise equalities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.errors import AppendError
from coordexp.metrics.table import find_metric
from coordexp.records import TokenRole
from coordexp.training import step_answers as training_answers
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.step import PreparedStep
from support.config_samples import pipeline
from support.tiny_run import (
    figures,
    finder,
    load_tiny,
    run_config,
    same_weights,
    step_lines,
    train,
    watch_steps,
    weights,
)

SGD = {"training__optim": "sgd", "training__learning_rate": 0.05, "training__max_grad_norm": 0.0}


def run(config: Any, backend: Any = None) -> tuple[CoordExpTrainer, list[PreparedStep]]:
    prepared_steps: list[list[PreparedStep]] = []
    trainer = train(config, backend, on_built=lambda trainer: prepared_steps.append(watch_steps(trainer)))
    return trainer, prepared_steps[0]


# -- Channel-A ---------------------------------------------------------------------------------------------------------

COORD_LOSS = {
    "enabled": True, "ce_weight": 0.0, "soft_ce_weight": 1.0, "w1_weight": 1.0, "gate_weight": 1.0,
    "text_gate_weight": 0.5, "temperature": 1.0, "target_sigma": 2.0, "target_truncate": None,
}  # fmt: skip


def sft_as_a_pipeline() -> dict[str, Any]:
    declared = pipeline()
    declared["objective"] = declared["objective"][:2]
    declared["objective"][1]["config"]["text_gate_weight"] = 0.5
    return declared


def test_channel_a_with_one_forward_is_bitwise_stage_1(tmp_path: Path) -> None:
    """Rows of 150 tokens: segments wait in the buffer, so the packing is compared too."""
    common = {"global_max_length": 150, "training__per_device_train_batch_size": 4, "training__max_steps": 3}
    sft = train(run_config(tmp_path, 1, "sft", custom__coord_soft_ce_w1=COORD_LOSS, **common))
    channel_a = train(
        run_config(tmp_path, "two_channel", "a", stage2_ab__schedule__b_ratio=0, stage2_ab__n_softctx_iter=1,
                   stage2_ab__pipeline=sft_as_a_pipeline(), **common)
    )  # fmt: skip
    assert same_weights(weights(sft.model), weights(channel_a.model))
    plain = [
        {name.replace("/A/", "/"): value for name, value in line.items() if not name.startswith("stage2/")}
        for line in figures(channel_a)
    ]
    assert plain == figures(sft) and len(plain) == 3
    assert all(line["packing/buffer_segments"] > 0 for line in plain)
    assert all(line["stage2/channel_a"] == 1 and line["stage2/b_ratio_realised"] == 0 for line in step_lines(channel_a))


def test_later_forwards_change_only_coordinates(tmp_path: Path) -> None:
    """The first step's losses: the same weights read the same text, and other coordinates."""
    keys = {"stage2_ab__schedule__b_ratio": 0, "training__max_steps": 1}
    one, two, three = (
        step_lines(train(run_config(tmp_path, "two_channel", f"by{n}", stage2_ab__n_softctx_iter=n, **keys)))[0]
        for n in (1, 2, 3)
    )
    for line in (two, three):
        assert line["loss/A/token_ce/struct_ce"] == pytest.approx(one["loss/A/token_ce/struct_ce"], rel=1e-6)
        for term in ("coord_reg/soft_ce", "bbox_geo/smoothl1", "bbox_geo/ciou"):  # all of them read the last forward
            assert line[f"loss/A/{term}"] != pytest.approx(one[f"loss/A/{term}"], rel=1e-6), term
        assert line["loss"] == pytest.approx(sum(v for name, v in line.items() if name.startswith("loss/")), rel=1e-5)
    assert three["loss/A/coord_reg/soft_ce"] != two["loss/A/coord_reg/soft_ce"]


def test_a_step_of_channel_a_does_not_depend_on_its_packing(tmp_path: Path) -> None:
    """One row of four samples, or four micro-steps of one: the same gradient, also of recomputed self-context."""
    keys = {"stage2_ab__schedule__b_ratio": 0, "stage2_ab__n_softctx_iter": 3, "training__max_steps": 1, **SGD}
    keys |= {"stage2_ab__coord_ctx_embed_mode": "soft", "training__gradient_checkpointing": True}
    whole, split = (
        train(run_config(tmp_path, "two_channel", f"by{batch}", training__per_device_train_batch_size=batch,
                         training__gradient_accumulation_steps=4 // batch, **keys))
        for batch in (4, 1)
    )  # fmt: skip
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(split.model)[name], value, atol=5e-6, rtol=1e-4, msg=name)
    assert not same_weights(weights(load_tiny().model), weights(whole.model))


# -- Channel-B ---------------------------------------------------------------------------------------------------------


def test_channel_b_trains_on_every_sample_of_its_step_in_that_step(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, "two_channel", stage2_ab__schedule__b_ratio=1, global_max_length=150, training__max_steps=3,
        training__per_device_train_batch_size=2, training__gradient_accumulation_steps=3,
    )  # fmt: skip
    backend = finder()
    trainer, prepared_steps = run(config, backend)
    assert trainer.state.global_step == 3
    for prepared, line in zip(prepared_steps, step_lines(trainer), strict=True):
        assert len(prepared.rows) >= 3
        trained = [segment.sample_id for row in prepared.rows for segment in row.segments]
        assert sorted(trained) == sorted(outcome.rollout.sample_id for outcome in prepared.outcomes)
        assert len(trained) == line["train/samples_total"] == line["rollout/samples_total"] == 6
        assert line["train/micro_steps"] == len(prepared.rows)
        assert all(row.length <= 150 for row in prepared.rows)
        assert line["packing/buffer_segments"] == 0
    assert backend.versions == [0, 1, 2]


def test_channel_b_does_not_depend_on_its_packing(tmp_path: Path) -> None:
    """Many short rows or one long one: the same gradient."""
    keys = {"stage2_ab__schedule__b_ratio": 1, "training__max_steps": 1, "training__per_device_train_batch_size": 6,
            **SGD}  # fmt: skip
    (many, many_windows), (one, one_windows) = (
        run(run_config(tmp_path, "two_channel", f"rows{length}", global_max_length=length, **keys), finder())
        for length in (130, 2000)
    )
    assert len(many_windows[0].rows) >= 3 and len(one_windows[0].rows) == 1
    assert step_lines(many)[0]["loss"] == pytest.approx(step_lines(one)[0]["loss"], rel=1e-5)
    for name, value in weights(one.model).items():
        torch.testing.assert_close(weights(many.model)[name], value, atol=5e-6, rtol=1e-4, msg=name)
    assert not same_weights(weights(load_tiny().model), weights(one.model))


def test_channel_b_supervises_matched_structure_and_rollout_aligned_does_not(tmp_path: Path) -> None:
    """One sample, found but for one object. The means of cross-entropy and text gate are over more tokens in Channel-B,
    by exactly those."""
    keys = {"training__max_steps": 1, "training__per_device_train_batch_size": 6}
    _, (aligned,) = run(run_config(tmp_path, 2, "aligned", **keys), finder())
    _, (prepared,) = run(run_config(tmp_path, "two_channel", "b", stage2_ab__schedule__b_ratio=1, **keys), finder())
    roles = [role for row in prepared.rows for segment in row.segments for role in segment.target.roles_T.tolist()]
    more = prepared.totals["struct_ce"] - aligned.totals["struct_ce"]
    assert more == roles.count(TokenRole.MATCHED_STRUCT) > 0
    grown = {term: aligned.totals[term] + more for term in ("struct_ce", "text_gate")}
    assert prepared.totals == {**aligned.totals, **grown}


def test_an_answer_that_cannot_be_closed_is_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser leaves no such prefix; were one to come, its sample must not stop the others."""
    build, seen = training_answers.build_target, []

    def refuse_every_third(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["sample_id"])
        if len(seen) % 3 == 0:
            raise AppendError("the prefix does not end where an entry may follow")
        return build(*args, **kwargs)

    monkeypatch.setattr(training_answers, "build_target", refuse_every_third)
    keys = {"training__max_steps": 1, "training__per_device_train_batch_size": 6}
    trainer, (prepared,) = run(
        run_config(tmp_path, "two_channel", "b", stage2_ab__schedule__b_ratio=1, **keys), finder()
    )
    (line,) = step_lines(trainer)
    assert line["stage2/closure_dropped_total"] == 2 and line["rollout/samples_total"] == 6
    assert sum(len(row.segments) for row in prepared.rows) == line["packing/segments_total"] == 4
    seen.clear()
    with pytest.raises(AppendError):  # elsewhere it is an error
        train(run_config(tmp_path, 2, "aligned", **keys), finder())


def test_a_step_without_a_usable_answer_runs_a_blank_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AppendError("the prefix does not end where an entry may follow")

    monkeypatch.setattr(training_answers, "build_target", refuse)
    trainer, (prepared,) = run(
        run_config(tmp_path, "two_channel", stage2_ab__schedule__b_ratio=1, training__max_steps=1, **SGD), finder()
    )
    (line,) = step_lines(trainer)
    assert line["packing/blank_rows_total"] == len(prepared.rows) == 1 and line["stage2/closure_dropped_total"] == 2
    assert line["loss"] == 0 and line["grad_norm"] == 0
    assert same_weights(weights(trainer.model), weights(load_tiny().model))


# -- the mix -----------------------------------------------------------------------------------------------------------


def test_the_schedule_decides_the_metrics_of_a_step(tmp_path: Path) -> None:
    config = run_config(tmp_path, "two_channel", training__max_steps=6, stage2_ab__schedule__b_ratio=0.4)
    backend = finder()
    trainer, prepared_steps = run(config, backend)
    assert [trainer.step.task_of(step).channel for step in range(len(prepared_steps))] == ["A", "A", "B", "A", "B", "A"]
    lines = step_lines(trainer)
    assert [line["stage2/channel_b"] for line in lines] == [0, 0, 1, 0, 1, 0]
    assert [line["stage2/channel_a"] for line in lines] == [1, 1, 0, 1, 0, 1]
    assert [line["stage2/b_ratio_realised"] for line in lines] == pytest.approx([0, 0, 1 / 3, 1 / 4, 2 / 5, 1 / 3])
    for line in lines:
        channel = "B" if line["stage2/channel_b"] else "A"
        other = "A" if channel == "B" else "B"
        assert [name for name in line if name.startswith(f"loss/{channel}/")]
        assert not [name for name in line if f"/{other}/" in name]
        families = {name.partition("/")[0] for name in line}
        assert ("rollout" in families) == ("safeguard" in families) == (channel == "B")
        assert not [name for name in line if find_metric(name) is None]
    assert backend.versions == [2, 4]  # weights are pushed when there is something to answer


@pytest.mark.parametrize("own", ["A", "B"])
def test_a_module_acts_only_in_its_channels(own: str, tmp_path: Path) -> None:
    declared = pipeline()
    declared["objective"] = declared["objective"][:2]
    declared["objective"][1]["channels"] = [own]
    config = run_config(tmp_path, "two_channel", stage2_ab__pipeline=declared, stage2_ab__schedule__b_ratio=0.5)
    lines = step_lines(train(config, finder()))
    for channel, line in zip("AB", lines, strict=True):
        terms = {"token_ce", "coord_reg"} if channel == own else {"token_ce"}
        assert {name.split("/")[2] for name in line if name.startswith(f"loss/{channel}/")} == terms


def test_only_rollout_steps_are_recorded(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, "two_channel", training__max_steps=4, training__logging_steps=1,
        rollout_matching__monitor_dump={"enabled": True, "every_steps": 1},
    )  # fmt: skip
    trainer = train(config)
    trainer.close()
    from coordexp.recording.rollout_record import read_records

    records = read_records(tmp_path / "run" / "rollout_records")
    assert sorted({record.where.global_step for record in records}) == [1, 3]
