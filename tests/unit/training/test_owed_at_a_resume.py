"""Duties of a resumed run: the rate of its own schedule, an evaluation that a stop left out, a best model that was
measured; and figures that no evaluation has."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from coordexp.checkpoints.card import with_own_template
from coordexp.data import read_jsonl, write_jsonl
from coordexp.errors import ConfigError, RunStopped
from coordexp.training.checked_run import check_run
from coordexp.training.run import build_trainer, run_training
from support.tiny_run import run_config, tiny_scenes, train

BEST: dict[str, Any] = {
    "training__save_strategy": "steps", "training__save_steps": 1, "training__eval_strategy": "steps",
    "training__eval_steps": 1, "training__load_best_model_at_end": True, "custom__val_sample_limit": 2,
    "training__metric_for_best_model": "rollout/f1", "training__logging_steps": 1,
}  # fmt: skip


def rates(trainer: Any) -> list[float]:
    return [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]


def evaluated(trainer: Any) -> list[int]:
    return [line["step"] for line in trainer.state.log_history if "eval_time/runtime_s" in line]


def test_a_longer_run_has_the_rates_of_its_own_schedule(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 2, "training__logging_steps": 1,
            "training__lr_scheduler_type": "linear"}  # fmt: skip
    train(run_config(tmp_path, 1, "short", **keys, training__max_steps=2))
    longer = run_config(tmp_path, 1, "short", **keys, training__max_steps=4, training__resume_from_checkpoint=True)
    assert rates(train(longer)) == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau", "greedy"])
def test_an_allowed_change_of_rate_and_schedule_is_made(schedule: str, tmp_path: Path) -> None:
    by_metric = schedule != "linear"
    keys = BEST | {"training__lr_scheduler_type": schedule, "training__max_steps": 1}
    train(run_config(tmp_path, 1, "run", **keys))
    changed: dict[str, Any] = {"training__max_steps": 2, "training__resume_from_checkpoint": True,
                               "training__resume_with_changes": True, "training__learning_rate": 4e-3}  # fmt: skip
    if by_metric:
        changed["training__lr_scheduler_kwargs"] = {"patience": 3}
    resumed = train(run_config(tmp_path, 1, "run", **keys | changed))
    assert rates(resumed) == pytest.approx([1e-3, 4e-3 if by_metric else 2e-3])
    assert getattr(resumed.run.scheduler, "patience", 3) == 3
    assert set(getattr(resumed.run.scheduler, "_init_lrs", [4e-3])) == {4e-3}, "to which a greedy schedule returns"


def test_a_signal_at_an_evaluation_postpones_it(tmp_path: Path) -> None:
    whole = train(run_config(tmp_path, 1, "whole", **BEST))
    trainer, _ = build_trainer(check_run(run_config(tmp_path, 1, "stopped", **BEST)), Console(quiet=True))
    trainer.train(signal=lambda: 15)
    assert (trainer.stopped_by, evaluated(trainer)) == (15, [])
    resumed = train(run_config(tmp_path, 1, "stopped", **BEST, training__resume_from_checkpoint=True))
    assert evaluated(resumed) == evaluated(whole) == [1, 2]
    assert Path(resumed.state.best_model_checkpoint).name == Path(whole.state.best_model_checkpoint).name


def test_a_callback_may_end_a_resumed_run_at_the_evaluation_that_it_owes(tmp_path: Path) -> None:
    """As early stopping does, between two log lines: the loss of the process before is logged."""

    class Enough(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    keys = BEST | {"training__logging_steps": 5, "training__max_steps": 4}
    stopped, _ = build_trainer(check_run(run_config(tmp_path, 1, "run", **keys)), Console(quiet=True))
    stopped.train(signal=lambda: 15)
    loss = stopped.run.sums.state_dict()["values"]["loss"]
    resumed = train(
        run_config(tmp_path, 1, "run", **keys, training__resume_from_checkpoint=True),
        on_built=lambda trainer: trainer.add_callback(Enough()),
    )
    assert resumed.state.global_step == 1 and evaluated(resumed) == [1]
    assert [line["loss"] for line in resumed.state.log_history if "loss" in line] == [loss]
    assert resumed.state.log_history[-1]["train_loss"] == loss


@pytest.mark.parametrize(("evaluated", "saved"), [(1, 0.5), (0.3, 0.5), (0.5, 2)])
def test_intervals_of_the_best_model_may_be_shares_of_the_run(evaluated: float, saved: float, tmp_path: Path) -> None:
    """Of four steps all are evaluated, or every second one; every second one is saved."""
    keys = BEST | {"training__max_steps": 4, "training__eval_steps": evaluated, "training__save_steps": saved}
    trainer = train(run_config(tmp_path, 1, "run", **keys))
    assert Path(trainer.state.best_model_checkpoint).name in ("checkpoint-2", "checkpoint-4")
    assert trainer.args.load_best_model_at_end is True


def test_larger_batches_do_not_end_a_run_before_what_it_has_trained(tmp_path: Path) -> None:
    """Four of six steps are trained; with batches of four samples, an epoch has three."""
    epoch = {"training__max_steps": -1, "training__num_train_epochs": 1, "training__resume_from_checkpoint": True}
    stopped, _ = build_trainer(check_run(run_config(tmp_path, 1, "run", **epoch)), Console(quiet=True))
    stopped.train(signal=lambda: 15 if stopped.state.global_step == 4 else None)
    larger = {"training__per_device_train_batch_size": 4, "training__resume_with_changes": True}
    with pytest.raises(ConfigError) as refused:
        train(run_config(tmp_path, 1, "run", **epoch | larger))
    assert "has trained 4 of 6 steps (0.6667 epochs), and the run ends after 3 now" in str(refused.value)
    assert "training.per_device_train_batch_size: 2 in the checkpoint, 4 now" in str(refused.value)
    assert train(run_config(tmp_path, 1, "run", **epoch)).state.global_step == 6


def test_the_last_evaluation_is_owed_too_and_may_be_the_best(tmp_path: Path) -> None:
    """That of step 3, not a multiple of 2, with a checkpoint from before it."""
    keys = BEST | {"training__eval_steps": 2, "training__max_steps": 3, "training__save_steps": 2}
    stopped, _ = build_trainer(check_run(run_config(tmp_path, 1, "run", **keys)), Console(quiet=True))
    with pytest.raises(RunStopped):
        stopped.train(signal=lambda: 15 if stopped.state.global_step == 3 else None)
    assert evaluated(stopped) == [2]

    resumed = train(
        run_config(tmp_path, 1, "run", **keys, training__resume_from_checkpoint=True), on_built=scripted(0.75)
    )
    assert evaluated(resumed) == [2, 3] and Path(resumed.state.best_model_checkpoint).name == "checkpoint-3"


def scripted(*f1: float) -> Callable[[Any], None]:
    """Evaluations with these figures, one after the other."""

    def install(trainer: Any) -> None:
        evaluate, figures = trainer.evaluate, iter(f1)
        trainer.evaluate = lambda: evaluate() | {"eval_rollout/f1": next(figures)}

    return install


def test_only_a_step_with_a_checkpoint_may_be_the_best(tmp_path: Path) -> None:
    keys = BEST | {"training__max_steps": 6, "training__save_steps": 2, "training__save_total_limit": 1}
    trainer = train(run_config(tmp_path, 1, "run", **keys), on_built=scripted(0.1, 0.4, 0.9, 0.5, 0.2, 0.3))
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-4" and trainer.state.best_metric == 0.5
    assert sorted(path.name for path in tmp_path.glob("run/checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(("max_steps", "best"), [(4, 4), (3, 3)])
def test_an_epochs_checkpoint_may_be_the_best_by_an_evaluation_of_its_step(
    max_steps: int, best: int, tmp_path: Path
) -> None:
    """Evaluations come before the checkpoint of their step; an epoch has two steps, and the last one may be shorter."""
    keys = BEST | {"training__save_strategy": "epoch", "training__load_best_model_at_end": False}
    keys |= {"training__per_device_train_batch_size": 6, "training__max_steps": max_steps}
    trainer = train(run_config(tmp_path, 1, "run", **keys), on_built=scripted(0.9, 0.1, 0.5, 0.6))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best}")


def test_the_checkpoint_that_a_run_in_another_folder_resumes_from_may_be_the_best(tmp_path: Path) -> None:
    """Its evaluation was owed."""
    stopped, _ = build_trainer(check_run(run_config(tmp_path, 1, "run", **BEST)), Console(quiet=True))
    stopped.train(signal=lambda: 15)
    first = tmp_path / "run" / "checkpoint-1"
    keys = BEST | {"training__resume_from_checkpoint": str(first), "training__max_steps": 3}
    trainer = train(run_config(tmp_path, 1, "other", **keys), on_built=scripted(0.9, 0.1, 0.2))
    assert evaluated(trainer) == [1, 2, 3] and trainer.state.best_model_checkpoint == str(first)
    kept = load_file(first / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in trainer.model.state_dict().items() if name in kept)


def test_a_best_figure_without_a_checkpoint_names_no_other_one(tmp_path: Path) -> None:
    train(run_config(tmp_path, 1, "run", **BEST, training__max_steps=1), on_built=scripted(0.1))
    keys = BEST | {"training__save_strategy": "no", "training__load_best_model_at_end": False}
    resumed = run_config(tmp_path, 1, "run", **keys, training__resume_from_checkpoint=True)
    state = train(resumed, on_built=scripted(0.9)).state
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (0.9, 2, None)


def test_an_evaluation_without_the_figure_has_no_best_checkpoint(tmp_path: Path) -> None:
    """Lost objects are counted from the second evaluation on."""
    keys = BEST | {"training__metric_for_best_model": "rollout/lost_rate"}
    trainer = train(run_config(tmp_path, 1, "run", **keys))
    assert evaluated(trainer) == [1, 2] and Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"


@pytest.mark.parametrize(("is_loaded", "lost"), [(True, "checkpoint-1"), (False, "checkpoint-1/model.safetensors")])
def test_a_best_checkpoint_that_is_gone_or_incomplete_is_forgotten(is_loaded: bool, lost: str, tmp_path: Path) -> None:
    keys = BEST | {"training__load_best_model_at_end": is_loaded}
    train(run_config(tmp_path, 1, "run", **keys, training__max_steps=2), on_built=scripted(0.9, 0.1))
    path = tmp_path / "run" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    keys |= {"training__max_steps": 3, "training__resume_from_checkpoint": True}
    said = io.StringIO()
    resumed, checkpoint = build_trainer(check_run(run_config(tmp_path, 1, "run", **keys)), Console(file=said))
    scripted(0.2)(resumed)
    resumed.train(str(checkpoint))
    assert resumed.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-3")
    why = "the best checkpoint is gone or incomplete"
    assert f"note: {why}; the best checkpoint is chosen from the next evaluation on\n" in said.getvalue()


def test_the_start_is_no_checkpoint_that_could_be_the_best(tmp_path: Path) -> None:
    trainer = train(run_config(tmp_path, 1, **BEST, training__eval_on_start=True))
    assert evaluated(trainer) == [0, 1, 2]
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-1"


def test_figures_of_other_images_are_not_compared(tmp_path: Path) -> None:
    train(run_config(tmp_path, 1, "run", **BEST, training__max_steps=1))
    other = tmp_path / "other.jsonl"
    write_jsonl(list(read_jsonl(tiny_scenes()))[2:4], other)
    keys = BEST | {"training__resume_from_checkpoint": True, "custom__val_jsonl": str(other)}
    assert Path(train(run_config(tmp_path, 1, "run", **keys)).state.best_model_checkpoint).name == "checkpoint-2"


@pytest.mark.parametrize(
    ("keys", "best"),
    [
        ({}, "checkpoint-1"),
        ({"rollout_matching__eval_detection": {"f1ish_iou_thrs": [0.9]}}, "checkpoint-2"),
        ({"rollout_matching__max_new_tokens": 5}, "checkpoint-2"),
        ({"training__metric_for_best_model": "rollout/recall", "training__resume_with_changes": True}, "checkpoint-2"),
    ],
)
def test_figures_of_another_measure_are_not_compared(keys: dict[str, Any], best: str, tmp_path: Path) -> None:
    """Without a change, the first of equal ones is the best."""
    plateau = BEST | {"training__lr_scheduler_type": "reduce_lr_on_plateau"}
    train(run_config(tmp_path, 1, "run", **plateau, training__max_steps=1))
    resumed = train(run_config(tmp_path, 1, "run", **plateau | keys, training__resume_from_checkpoint=True))
    assert Path(resumed.state.best_model_checkpoint).name == best
    assert resumed.run.scheduler.num_bad_epochs == int(best == "checkpoint-1")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"training__metric_for_best_model": "rollout/F1"}, "eval_rollout/f1"),
        ({"rollout_matching__eval_detection": {"enabled": False}}, "rollout_matching.eval_detection.enabled"),
        (
            {"rollout_matching__eval_detection": {"metrics": "f1ish"}, "training__metric_for_best_model": "rollout/AP"},
            "metrics: both",
        ),
        ({"training__metric_for_best_model": "rollout/segm_AP"}, "use_segm: true"),
        ({"training__metric_for_best_model": "rollout/f1@0.75"}, "f1ish_iou_thrs with 0.75"),
        ({"training__save_steps": 0.4, "training__eval_steps": 0.2, "training__max_steps": 11}, "training.save_steps"),
    ],
)
def test_a_best_model_that_cannot_be_known_is_refused(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        train(run_config(tmp_path, 1, **BEST | keys))


def test_training_keeps_a_checkpoints_order_of_objects(tmp_path: Path) -> None:
    run_training(run_config(tmp_path, 1, "first", custom__object_ordering="sorted_x"), Console(quiet=True))
    again = run_config(tmp_path, 1, "again", model__model=str(tmp_path / "first"))
    assert with_own_template(again).custom.object_ordering == "sorted_x"
    named = run_config(tmp_path, 1, "named", model__model=str(tmp_path / "first"), custom__object_ordering="random")
    assert with_own_template(named).custom.object_ordering == "random"


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    keys = {"tuner__train_type": "lora", "training__save_strategy": "steps", "training__save_steps": 1}
    files = [
        (Path(tmp_path / name / "checkpoint-2" / "coord_offset.safetensors").read_bytes())
        for name in ("a", "b")
        if train(run_config(tmp_path, 1, name, **keys))
    ]
    assert len(set(files)) == 1
