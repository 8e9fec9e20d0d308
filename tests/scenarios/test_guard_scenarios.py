"""Where the repeat guard's server contract ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config, resolved_rollout
from coordexp.engine import check_backend
from coordexp.engine.arguments import CONFIG_JSON, CONFIG_JSON_PATH, ENABLE, GUARD_PROCESSOR
from coordexp.engine.colocated import ColocatedBackend
from coordexp.launch.plan import plan_launch
from coordexp.rollouts.backend import decoding_options
from coordexp.rollouts.learner import LearnerParts
from support.config_samples import set_key, write_yaml
from support.rollout_servers import server_config
from support.tiny_run import tiny_checkpoint

GUARD = {"enabled": True, "ngram_size": 8}


def colocated(folder: Path, **repeat_terminate: Any) -> Any:
    config = server_config(folder, checkpoint=tiny_checkpoint())
    config = set_key(config, "rollout_matching.vllm", {"mode": "colocate", "tensor_parallel_size": 1})
    return load_config(write_yaml(folder, set_key(config, "rollout_matching.repeat_terminate", repeat_terminate)))


def engine_arguments(run: Any) -> dict[str, Any]:
    unused: Any = None
    rollout = resolved_rollout(run)
    learner = LearnerParts(unused, unused, 0, unused, tiny_checkpoint(), unused)
    return ColocatedBackend(rollout, learner, decoding_options(rollout)).engine_arguments


@pytest.mark.scenario("Non-server vLLM paths are unchanged by this delta")
def test_a_colocated_engine_needs_no_server_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine inside the trainer needs no plugin, variables or status; without the guard it has the arguments of an
    engine that never had one."""
    for name in (ENABLE, CONFIG_JSON, CONFIG_JSON_PATH):
        monkeypatch.delenv(name, raising=False)
    plain, guarded = colocated(tmp_path), colocated(tmp_path, **GUARD)
    for run in (plain, guarded):
        assert run.rollout_matching is not None
        check_backend(run.rollout_matching)  # sends no request
        plan = plan_launch(run, tmp_path / "run.yaml", local=())
        assert plan.servers == () and not {ENABLE, CONFIG_JSON} & set(plan.learner.environment)
    pytest.importorskip("vllm", reason="the engine's worker extension is a class of vLLM's interface")
    arguments = engine_arguments(plain)
    assert GUARD_PROCESSOR not in arguments["logits_processors"] and "async_scheduling" not in arguments
    disabled = colocated(tmp_path, **{**GUARD, "enabled": False})
    assert engine_arguments(disabled) == arguments
