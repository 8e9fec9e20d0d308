"""Two processes of two-channel training are one with twice the batch, also where their rows differ in number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.errors import AppendError
from coordexp.training import answers as training_answers
from support.tiny_run import run_config, train
from support.two_channel_runs import SGD, assert_same_training, trained_by_two


@pytest.mark.parametrize("sharded", [False, True])
def test_a_mixed_run_is_the_same_in_two_processes(sharded: bool, tmp_path: Path) -> None:
    """A, B, A, B; Channel-A with three forwards within the wrapped model's one call: DDP, and FSDP's shards."""
    keys = SGD | {"training__max_steps": 4, "stage2_ab__n_softctx_iter": 3, "stage2_ab__coord_ctx_embed_mode": "soft",
                  "global_max_length": 2000}  # fmt: skip
    alone = train(run_config(tmp_path, "two_channel", "one", training__per_device_train_batch_size=4, **keys))
    ranks = trained_by_two(run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=2,
                                fsdp__enabled=sharded, **keys))  # fmt: skip
    assert [line["stage2/channel_b"] for line in ranks[0]["steps"]] == [0, 1, 0, 1]
    assert_same_training(tmp_path / "two", alone, ranks)


def test_ranks_with_unequal_rows_stay_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows, so that ranks have several and unequally many; and in the first step nothing of rank 1 can be
    closed, so that it has none."""
    keys = SGD | {"training__max_steps": 3, "stage2_ab__schedule__b_ratio": 1, "global_max_length": 130}

    def alone(name: str, refused: frozenset[str] = frozenset(), **more: Any) -> Any:
        build = training_answers.build_target

        def build_or_refuse(*args: Any, **kwargs: Any) -> Any:
            if kwargs["sample_id"] in refused:
                raise AppendError("the prefix does not end where an entry may follow")
            return build(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(training_answers, "build_target", build_or_refuse)
            return train(
                run_config(tmp_path, "two_channel", name, training__per_device_train_batch_size=6, **keys | more)
            )

    seen = alone("look", training__max_steps=1).step.prepared.outcomes
    of_rank_1 = [outcome.rollout.sample_id for outcome in seen][3:]
    one = alone("one", frozenset(of_rank_1))
    ranks = trained_by_two(
        run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=3, **keys), *of_rank_1
    )
    assert_same_training(tmp_path / "two", one, ranks)
    lines = ranks[0]["steps"]
    assert lines[0]["stage2/closure_dropped_total"] == 3 and lines[0]["packing/blank_rows_total"] > 0
    assert lines[0]["packing/segments_total"] - lines[0]["packing/blank_rows_total"] == 3
    assert all(line["train/micro_steps"] % 2 == 0 for line in lines), "a rank had more forwards than the other"
