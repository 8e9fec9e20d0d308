"""Every shipped YAML has a row, and rows replace nothing that they must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from as_shipped.starting import RowRun
from as_shipped.table import CONFIGS, FRAGMENTS, INTERRUPTIONS, ROWS, STARTED, Row, interruption, row, shipped

# A row replaces where things are and how much there is of them.
REPLACED = {
    "model.model", "custom.train_jsonl", "custom.val_jsonl", "custom.val_sample_limit", "training.output_dir",
    "training.effective_batch_size", "training.per_device_train_batch_size", "training.save_steps",
    "training.eval_steps", "training.max_steps", "global_max_length", "rollout_matching.max_new_tokens",
    "rollout_matching.vllm.server.servers",
}  # fmt: skip
# Only a machine without a GPU takes these.
ON_CPU = {
    "rollout_matching.vllm.enforce_eager", "rollout_matching.vllm.gpu_memory_utilization", "launch.server_devices",
    "launch.learner_devices",
}  # fmt: skip


def test_every_shipped_yaml_has_one_row() -> None:
    names = [one.name for one in ROWS] + list(FRAGMENTS)
    assert sorted(names) == list(shipped())


@pytest.mark.parametrize("row", ROWS, ids=lambda one: one.name)
def test_a_row_replaces_places_and_sizes_only(row: Row) -> None:
    assert row.short.keys() <= REPLACED and row.on_cpu.keys() <= ON_CPU and row.why


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_fragment_is_part_of_a_row(fragment: str) -> None:
    path = row(FRAGMENTS[fragment]).path
    parents = yaml.safe_load(path.read_text(encoding="utf-8"))["extends"]
    assert (CONFIGS / f"{fragment}.yaml").resolve() in [(path.parent / one).resolve() for one in parents]


@pytest.mark.parametrize("same", [one for one in ROWS if one.same_as], ids=lambda one: one.name)
def test_a_row_that_is_not_interrupted_is_the_same_run_as_one_that_is(same: Row, tmp_path: Path) -> None:
    assert same.same_as is not None and row(same.same_as).same_as is None
    runs = [RowRun(one, tmp_path).resolved().model_dump() for one in (same, row(same.same_as))]
    assert runs[0] == runs[1]


def test_each_signal_ends_a_row_of_each_kind_and_every_file_for_users_models_is_interrupted() -> None:
    kinds = {one.kind for one in STARTED}
    by_kind = {(one.kind, number) for one in STARTED if (number := interruption(one)) is not None}
    assert by_kind == {(kind, by) for kind in kinds for by in INTERRUPTIONS}
    assert [one.name for one in STARTED if interruption(one) is None and not one.is_small] == []


def test_runs_end_within_and_after_epochs_with_several_numbers_of_loader_processes_and_ranks(tmp_path: Path) -> None:
    assert {one.ends for one in STARTED} == {"in the middle of an epoch", "at the end of an epoch"}
    assert {one.ranks for one in STARTED} == {1, 2}
    runs = [RowRun(one, tmp_path, **more).resolved() for one in STARTED for more in ({}, one.interrupted_with)]
    assert {run.data.num_workers for run in runs} == {0, 1, 4}
    assert all(run.training.max_steps >= 3 for run in runs), "interrupted before the last two"
