"""Prefetched rollouts on a real server: their weight versions, and a killed run that resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.rollout_servers import PlainServer, server_keys, vllm_config
from support.tiny_run import Killed, kill_at, same_weights, step_lines, train, weights


def test_answers_are_one_step_old_and_a_killed_run_resumes_bit_for_bit(
    plain_server: PlainServer, tmp_path: Path
) -> None:
    versions: dict[str, list[set[int]]] = {}

    def noting(name: str, dies_at: int | None = None) -> Any:
        def on_built(trainer: Any) -> None:
            if dies_at is not None:
                kill_at(dies_at)(trainer)
            accumulate = trainer.step.accumulate

            def accumulate_and_note(batches: Any, step: int) -> None:
                accumulate(batches, step)
                outcomes = trainer.step.prepared.outcomes
                versions.setdefault(name, []).append({one.rollout.weight_version for one in outcomes})

            trainer.step.accumulate = accumulate_and_note

        return on_built

    keys = server_keys(plain_server.get().config) | {
        "rollout_matching__rollouts_ahead": 1,
        "rollout_matching__decoding": {"temperature": 1.0},  # the seeds decide, too
        "training__max_steps": 5,
        "training__per_device_train_batch_size": 4,  # three steps an epoch
        "training__save_strategy": "steps",
        "training__save_steps": 3,
    }
    whole = train(vllm_config(tmp_path, "whole", **keys), on_built=noting("whole"))
    whole.close()
    killed = vllm_config(tmp_path, "killed", **keys | {"training__resume_from_checkpoint": True})
    with pytest.raises(Killed):
        train(killed, on_built=noting("killed", dies_at=4))
    resumed = train(killed, on_built=noting("resumed"))
    resumed.close()
    assert versions["whole"] == [{0}, {0}, {1}, {2}, {3}]
    assert versions["resumed"] == [{2}, {3}]
    assert [line["rollout/staleness_steps"] for line in step_lines(resumed)] == [0, 1, 1, 1, 1]
    assert [line["loss"] for line in step_lines(resumed)] == [line["loss"] for line in step_lines(whole)]
    assert same_weights(weights(resumed.model), weights(whole.model))
    said = [json.loads(line) for line in (tmp_path / "whole" / "rollout_log_rank0.jsonl").read_text().splitlines()]
    assert [(line["global_step"], line["weight_version"]) for line in said] == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
