"""Whole runs of a few steps: training, reproducibility, logs and refused settings."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainingArguments

from coordexp.errors import ConfigError, SegmentTooLong, TrainingDiverged
from coordexp.modeling.load import load_model
from coordexp.training.checked_run import check_run
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.rows import DeviceMetrics
from coordexp.training.run import build_trainer, run_training
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

PATCHES = (6 * 6, 8 * 8, 10 * 10, 12 * 12)  # of the scenes' images

# Metrics of a stage-2 step, besides its losses.
STEP_METRICS = {
    "rollout/samples_total", "rollout/valid_pred_objects_total", "rollout/parse_dropped_invalid",
    "rollout/parse_truncated_rate", "rollout/gt_objects_total", "rollout/matched_total", "rollout/match_rate",
    "rollout/fp_total", "rollout/fn_appended_total", "rollout/gating_rejections_total",
    "rollout/excluded_ambiguous_total", "rollout/prefix_coord_targets_total", "rollout/gen_new_tokens_mean",
    "rollout/gen_new_tokens_p99", "rollout/decode_greedy",
    "packing/post_rollout_fill", "packing/selected_tokens_total", "packing/segments_total", "packing/buffer_segments",
    "time/data_wait_s", "time/optimizer_s", "train/patches_total", "train/supervised_total",
    "time/weight_sync_s", "time/rollout_wait_s", "time/target_build_s", "time/learner_s", "time/forward_s",
    "train/samples_total", "train/tokens_total", "train/micro_steps", "train/nonfinite_positions_total",
}  # fmt: skip


def test_every_step_of_stage_2_logs_the_contracts_metrics(tmp_path: Path) -> None:
    trainer = train(run_config(tmp_path, 2, training__max_steps=3), finder())
    for line in step_lines(trainer):
        assert line.keys() >= STEP_METRICS, STEP_METRICS - line.keys()
        assert line["rollout/samples_total"] == line["train/samples_total"] == 2
        assert line["train/patches_total"] in {a + b for a in PATCHES for b in PATCHES}
        assert 0 < line["train/supervised_total"] < line["train/tokens_total"]
        assert line["rollout/matched_total"] + line["rollout/fn_appended_total"] == line["rollout/gt_objects_total"]
        assert line["loss"] == pytest.approx(sum(v for k, v in line.items() if k.startswith("loss/")), rel=1e-5)
        assert not [name for name in line if "iou" in name.lower() and not name.startswith("loss/")]
        assert not [name for name in line if "records" in name], "none are written unless asked for"
    assert not (tmp_path / "run" / "rollout_records").exists()
    assert sum(line["rollout/matched_total"] for line in step_lines(trainer)) > 0
    assert sum(line["rollout/prefix_coord_targets_total"] for line in step_lines(trainer)) > 0


def test_only_positions_that_the_head_computes_count_as_supervised(tmp_path: Path) -> None:
    declared = pipeline() | {"diagnostics": []}
    declared["objective"] = [one for one in declared["objective"] if one["name"] == "token_ce"]  # no coordinates
    prepared: list[list[PreparedStep]] = []
    config = run_config(tmp_path, 2, rollout_matching__pipeline=declared)
    trainer = train(config, finder(), lambda built: prepared.append(watch_steps(built)))
    totals = [step.totals for step in prepared[0]]
    assert all(one["coord"] for one in totals)
    assert [line["train/supervised_total"] for line in step_lines(trainer)] == [
        one["struct_ce"] + one["desc_ce"] for one in totals
    ]


def test_the_same_yaml_twice_gives_the_same_run(tmp_path: Path) -> None:
    sampling = {"rollout_matching__decoding": {"temperature": 1.0}}
    first, second = (train(run_config(tmp_path, 2, name, **sampling)) for name in ("a", "b"))
    assert figures(first) == figures(second)
    assert same_weights(weights(first.model), weights(second.model))
    other = train(run_config(tmp_path, 2, "c", training__seed=7, **sampling))
    assert figures(other) != figures(first)


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulated_micro_steps_equal_one_large_one(stage: int, tmp_path: Path) -> None:
    """Plain SGD, so that weights show the gradient itself."""
    common = {"training__optim": "sgd", "training__learning_rate": 0.05, "training__max_grad_norm": 0.0}
    common |= {"training__seed": 3}  # an order in which CIoU of a degenerate predicted box does not multiply rounding
    whole, split = (
        train(run_config(tmp_path, stage, f"by{batch}", training__per_device_train_batch_size=batch,
                         training__gradient_accumulation_steps=4 // batch, **common),
              finder() if stage == 2 else None)
        for batch in (4, 1)
    )  # fmt: skip
    losses, expected = ([line["loss"] for line in step_lines(one)] for one in (split, whole))
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(split.model)[name], value, atol=5e-6, rtol=1e-4)
    assert not same_weights(weights(load_tiny().model), weights(whole.model))


def test_without_packing_a_micro_step_is_one_row_of_its_own_samples(tmp_path: Path) -> None:
    packed = train(run_config(tmp_path, 1, "packed"))
    plain = train(run_config(tmp_path, 1, "plain", training__packing=False, global_max_length=20))  # no capacity then
    assert [line["loss"] for line in step_lines(plain)] == pytest.approx([line["loss"] for line in step_lines(packed)])
    assert "packing/post_rollout_fill" not in step_lines(plain)[0]
    assert plain.run.buffer is None


def test_one_log_line_covers_several_steps(tmp_path: Path) -> None:
    """Counters add up, losses and seconds are means, a state is its last value."""
    keys = {"training__max_steps": 4, "global_max_length": 150, "training__per_device_train_batch_size": 3}
    single = step_lines(train(run_config(tmp_path, 1, "single", **keys)))
    (double, last) = step_lines(train(run_config(tmp_path, 1, "double", training__logging_steps=2, **keys)))
    assert single[0]["packing/buffer_segments"] > 0 and single[-1]["packing/buffer_segments"] > 0
    for line, (a, b) in ((double, single[:2]), (last, single[2:])):
        assert line["loss"] == pytest.approx((a["loss"] + b["loss"]) / 2)
        assert line["loss/token_ce/struct_ce"] == pytest.approx(
            (a["loss/token_ce/struct_ce"] + b["loss/token_ce/struct_ce"]) / 2
        )
        assert line["train/tokens_total"] == a["train/tokens_total"] + b["train/tokens_total"]
        assert line["packing/buffer_segments"] == b["packing/buffer_segments"]


def test_non_finite_positions_are_counted_and_the_step_continues(tmp_path: Path) -> None:
    """NaN in the hidden states that predict a row's closing brace and end of turn."""

    def spoil(trainer: CoordExpTrainer) -> None:
        def hook(_: Any, __: Any, output: Any) -> Any:
            length = output.last_hidden_state.shape[1]
            rows = torch.tensor([length - 3, length - 2])
            output.last_hidden_state = output.last_hidden_state.index_fill(1, rows, math.nan)
            return output

        model: Any = trainer.model
        model.model.register_forward_hook(hook)

    trainer = train(run_config(tmp_path, 1), on_built=spoil)
    assert [line["train/nonfinite_positions_total"] for line in step_lines(trainer)] == [2, 2]
    assert [line["train/clamped_positions_total"] for line in step_lines(trainer)] == [0, 0]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in step_lines(trainer))


def test_the_device_is_read_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read waits for the device."""
    reads: list[int] = []
    sync = DeviceMetrics.sync

    def counted(metrics: DeviceMetrics) -> Any:
        reads.append(1)
        return sync(metrics)

    monkeypatch.setattr(DeviceMetrics, "sync", counted)
    trainer = train(run_config(tmp_path, 1, training__gradient_accumulation_steps=3))
    assert len(reads) == 2
    for line in step_lines(trainer):
        assert line["train/micro_steps"] == 3
        assert line["loss"] == pytest.approx(sum(v for k, v in line.items() if k.startswith("loss/")), rel=1e-5)


def test_a_model_that_is_all_nan_stops_the_run(tmp_path: Path) -> None:
    """The objective clamps NaN, so without this check the loss would stay finite."""

    def break_weights(trainer: CoordExpTrainer) -> None:
        with torch.no_grad():
            model: Any = trainer.model
            model.model.language_model.norm.weight.fill_(math.nan)

    with pytest.raises(TrainingDiverged, match=r"step 1.*learning_rate.*\. Nothing of this run is saved"):
        train(run_config(tmp_path, 1), on_built=break_weights)


def test_evaluation_logs_the_configured_metrics(tmp_path: Path) -> None:
    def measured(name: str, **keys: Any) -> list[set[str]]:
        """Names of each evaluation."""
        section = {f"rollout_matching__eval_detection__{key}": value for key, value in keys.items()}
        often = {"training__eval_strategy": "steps", "training__eval_steps": 1}
        trainer = train(run_config(tmp_path, 2, name, **often, **section))
        lines = [{key.removeprefix("eval_rollout/") for key in line if key.startswith("eval_rollout/")}
                 for line in trainer.state.log_history]  # fmt: skip
        return [line for line in lines if line]

    both = set().union(*measured("both", use_segm=True, f1ish_iou_thrs=[0.5, 0.75], score_mode="confidence"))
    assert {"AP", "AP50", "segm_AP", "f1@0.75"} <= both
    first, second = measured("alone", metrics="f1ish")
    assert "f1" in first and "AP" not in first | second
    assert second - first >= {"lost_rate", "gained_rate", "false_gained_rate"}
    assert len(list((tmp_path / "alone").rglob("first_evaluation.jsonl"))) == 1
    assert measured("off", enabled=False) == []


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    sampling = {"rollout_matching__decoding": {"temperature": 1.0}}
    plain = train(run_config(tmp_path, 2, "plain", **sampling))
    watched = train(run_config(tmp_path, 2, "watched", training__eval_strategy="steps", training__eval_steps=1,
                               **sampling))  # fmt: skip
    assert same_weights(weights(plain.model), weights(watched.model))
    lines = [line for line in watched.state.log_history if "eval_rollout/f1" in line]
    assert [(line["step"], line["eval_rollout/images"]) for line in lines] == [(1, 5), (2, 5)]
    assert {"eval_rollout/precision", "eval_rollout/recall", "eval_rollout/truncated_rate"} <= lines[0].keys()


@pytest.mark.scenario("Invalid vLLM configuration fails fast")
@pytest.mark.parametrize("stage", [1, 2])
def test_an_unsupported_backend_is_refused_before_loading(stage: int, tmp_path: Path) -> None:
    config = run_config(tmp_path, stage, rollout_matching__rollout_backend="vllm", model__model="/nowhere")
    with pytest.raises(ConfigError, match="rollout_backend: hf"):
        check_run(config)


def test_loader_processes_change_nothing_and_leave_no_shared_memory(tmp_path: Path) -> None:
    """A tensor from a loader process keeps a file open; hundreds of segments may wait in the buffer."""
    keys = {"global_max_length": 150, "training__per_device_train_batch_size": 3}
    alone = train(run_config(tmp_path, 1, "alone", **keys))
    helped = train(run_config(tmp_path, 1, "helped", data__num_workers=1, **keys))
    assert [line["loss"] for line in step_lines(helped)] == [line["loss"] for line in step_lines(alone)]
    waiting = helped.run.buffer.segments
    assert waiting
    assert not [value for segment in waiting for value in segment.model_inputs.values() if value.is_shared()]


def test_a_run_releases_its_rollout_engine_and_its_model_can_be_loaded_with_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[CoordExpTrainer] = []
    monkeypatch.setattr(CoordExpTrainer, "close", lambda self: closed.append(self))
    trainer = run_training(run_config(tmp_path, 1), Console(quiet=True))
    assert closed == [trainer]
    again = load_model(tmp_path / "run", "float32")
    assert same_weights(weights(again.model), weights(trainer.model))
    assert again.processor.chat_template == load_tiny().processor.chat_template


def test_a_sample_longer_than_a_row_stops_the_run_by_name_and_releases_the_rollout_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[CoordExpTrainer] = []
    monkeypatch.setattr(CoordExpTrainer, "close", lambda self: closed.append(self))
    with pytest.raises(SegmentTooLong, match=r"scenes.jsonl:\d+.*global_max_length"):
        run_training(run_config(tmp_path, 1, global_max_length=20), Console(quiet=True))
    assert len(closed) == 1


def test_one_process_uses_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DataParallel would cut a packed row's tensors along axes that mean something else."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 4)
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        trainer, _ = build_trainer(check_run(run_config(tmp_path, 1)), Console(quiet=True))
    assert trainer.args._n_gpu == 1 and "torchrun --nproc_per_node=4" in caplog.text


def test_a_gpu_that_torch_cannot_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts the GPUs of a driver that is too old for torch."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ConfigError, match=r"training\.use_cpu: 8 GPUs"):
        check_run(run_config(tmp_path, 1, training__use_cpu=False))
    check_run(run_config(tmp_path, 1, training__use_cpu=True))


def test_fp16_is_refused_without_a_gpu_and_bf16_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"training\.fp16: needs a GPU"):
        check_run(run_config(tmp_path, 1, training__use_cpu=False, training__fp16=True))
    bf16 = run_config(tmp_path, 1, training__use_cpu=False, training__bf16=True)
    assert build_trainer(check_run(bf16), Console(quiet=True))[0].args.bf16
    assert "no GPU is visible" in caplog.text


def test_arguments_are_passed_to_transformers_by_name(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, training__adam_beta2=0.9, training__weight_decay=0.2, training__seed=5)
    trainer, _ = build_trainer(check_run(config), Console(quiet=True))
    assert (trainer.args.adam_beta2, trainer.args.weight_decay, trainer.args.seed) == (0.9, 0.2, 5)
