"""Configuration → tasks: each channel trains its own modules, on targets with its own weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from coordexp.config.resolved import resolved_rollout
from coordexp.targets import SupervisionWeights
from coordexp.training.tasks import build_tasks
from support.answers import tiny_vocab
from support.config_samples import pipeline
from support.tiny_run import InMemoryBackend, run_config


def test_each_channel_has_the_weights_of_its_own_token_ce(tmp_path: Path) -> None:
    declared = pipeline()
    for_a, for_b = deepcopy(declared["objective"][0]), deepcopy(declared["objective"][0])
    for_a |= {"channels": ["A"], "weight": 3.0}
    for_a["config"] = {"struct_ce_weight": 0.25, "desc_ce_weight": 0.5, "rollout_fn_desc_weight": 0.0}
    for_b |= {"channels": ["B"], "weight": 1.0}
    for_b["config"] = {"struct_ce_weight": 2.0, "desc_ce_weight": 0.0, "rollout_fn_desc_weight": 0.75}
    declared["objective"][0:1] = [for_a, for_b]
    config = run_config(tmp_path, "two_channel", "run", stage2_ab__pipeline=declared)
    vocab = tiny_vocab()
    tasks, _ = build_tasks(config, resolved_rollout(config), vocab, InMemoryBackend(vocab, lambda _: ""), None)
    weights_a = SupervisionWeights(struct_ce=0.25, desc_ce=0.5, rollout_fn_desc_ce=0.0, matched_struct_ce=0.0)
    weights_b = SupervisionWeights(struct_ce=2.0, desc_ce=0.0, rollout_fn_desc_ce=0.75, matched_struct_ce=2.0)
    assert (tasks["A"].targets.weights, tasks["B"].targets.weights) == (weights_a, weights_b)
    modules = {
        channel: [(one.name, one.weight) for one in task.objective.pipeline.objective]
        for channel, task in tasks.items()
    }
    assert modules["A"][0] == ("token_ce", 3.0) and modules["B"][0] == ("token_ce", 1.0)
    assert [name for name, _ in modules["A"]].count("token_ce") == 1
