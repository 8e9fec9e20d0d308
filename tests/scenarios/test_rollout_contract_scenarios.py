"""Scenarios of the rollout contract: one validated configuration for trainer, backend, launcher and guard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordexp.cli.commands import app
from coordexp.config import ConfigError, check_world_size, load_config, resolved_rollout, rollout_contract
from coordexp.engine.trainer.backends import check_backend
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.engine.wire.arguments import CONFIG_JSON, CONFIG_JSON_PATH, ENABLE, GUARD_PROCESSOR, activated_config
from coordexp.errors import MissingDependency
from coordexp.launch.plan import plan_launch
from coordexp.rollouts.backend import TrainerParts, decoding_options
from coordexp.training.checked_run import check_run
from coordexp.training.run import build_trainer
from support.config_samples import set_key, stage2, write_yaml
from support.installed import needs
from support.rollout_servers import server_config
from support.tiny_run import run_config, tiny_checkpoint

SERVERS = [
    {"base_url": "http://127.0.0.1:8000", "group_port": 51216},
    {"base_url": "http://127.0.0.1:8001", "group_port": 51217},
]
ADAPTERS = {"train_type": "lora", "train_coord_rows": False}


def built(config: Any) -> Any:
    return build_trainer(check_run(config), Console(quiet=True))[0]


@pytest.mark.scenario("Canonical grouped config drives trainer contract")
def test_trainer_is_given_the_normalised_contract(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        2,
        rollout_matching__decoding={"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        rollout_matching__repeat_terminate={"enabled": True, "ngram_size": 8},
        rollout_matching__maskiou_gate=0.25,
        rollout_matching__vllm={"mode": "server", "server": {"servers": SERVERS}, "sync": {"mode": "auto"}},
        training__packing_buffer=99,
        custom__object_ordering="file",
    )
    trainer = built(config)
    contract = trainer.rollout_matching_cfg
    assert contract["rollout_backend"] == "hf"
    assert contract["decoding"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "skip_forced_tokens": None}
    assert (contract["repeat_terminate"]["ngram_size"], contract["repeat_terminate"]["min_new_tokens"]) == (8, 256)
    assert [server["group_port"] for server in contract["vllm"]["server"]["servers"]] == [51216, 51217]
    assert (contract["packing_enabled"], contract["packing_length"], contract["packing_buffer"]) == (True, 512, 99)
    assert (contract["object_ordering"], contract["object_field_order"]) == ("file", "desc_first")
    # auto, and nulls that mean the value of another key, are resolved.
    assert (contract["vllm"]["max_model_len"], contract["vllm"]["dtype"]) == (512, "float32")
    assert (contract["vllm"]["sync"]["mode"], contract["vllm"]["max_lora_rank"]) == ("full", 8)
    assert contract["maskiou_gate"] == 0.25
    (queue,) = [task.rollouts for task in trainer.step.tasks.values()]
    assert queue.backend is trainer.backend and queue.read.matching.maskiou_gate == 0.25
    assert (trainer.run.buffer.capacity, trainer.run.buffer.max_segments) == (512, 99)


@pytest.mark.scenario("Runtime rollout injection path stays stable")
@pytest.mark.parametrize("stage", [2, "two_channel"])
def test_every_rollout_trainer_has_the_loaded_contract(stage: Any, tmp_path: Path) -> None:
    config = run_config(tmp_path, stage)
    trainer = built(config)
    assert trainer.rollout_matching_cfg == rollout_contract(config)
    section = resolved_rollout(config).model_dump(mode="json")
    assert {key: trainer.rollout_matching_cfg[key] for key in section} == section


@pytest.mark.scenario("Non-full sync mode fails fast under multi-process learner")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_adapter_pushes_from_two_ranks_are_refused_at_start(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = {"mode": "server", "server": {"servers": SERVERS}, "enable_lora": True, "sync": {"mode": mode}}
    config = run_config(
        tmp_path, 2, tuner=ADAPTERS, rollout_matching__rollout_backend="vllm", rollout_matching__vllm=vllm
    )
    check_world_size(config, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"rollout_matching\.vllm\.sync\.mode: .*write sync\.mode: full"):
        check_run(config)  # before any request to a server, and before data or the model are read


@pytest.mark.scenario("Invalid vLLM configuration fails fast")
def test_missing_vllm_is_named_with_its_alternative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, 2, rollout_matching__rollout_backend="vllm")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    with pytest.raises(MissingDependency, match="rollout_backend: hf"):
        check_backend(resolved_rollout(config))
    # A run checks it too, before it looks for its model.
    with pytest.raises(MissingDependency, match="rollout_backend: hf"):
        keys = {"rollout_matching__vllm__tensor_parallel_size": 1, "model__model": "/nowhere"}
        check_run(run_config(tmp_path, 2, rollout_matching__rollout_backend="vllm", **keys))


@pytest.mark.scenario("Preflight/runtime consume a shared validated rollout contract")
def test_launcher_and_trainer_have_the_same_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coordexp.engine.server.options import serve_options

    monkeypatch.setenv("COORDEXP_TEST_KEY", "token")
    guard = {"enabled": True, "max_object_keys": 7}
    vllm = {
        "mode": "server",
        "server": {"servers": SERVERS, "api_key_env": "COORDEXP_TEST_KEY"},
        "tensor_parallel_size": 1,
    }
    keys = {"rollout_matching__repeat_terminate": guard, "rollout_matching__vllm": vllm}
    config = run_config(tmp_path, 2, **keys, rollout_matching__rollout_backend="vllm")
    plan = plan_launch(config, tmp_path / "run.yaml", local=(True, True))
    # The trainer of the same file with rollouts of its own: all but the backend's name is the same contract.
    contract = built(run_config(tmp_path, 2, **keys)).rollout_matching_cfg
    assert contract | {"rollout_backend": "vllm"} == rollout_contract(config)
    servers = contract["vllm"]["server"]["servers"]
    assert plan.server_base_urls == tuple(server["base_url"] for server in servers)
    assert [server.group_port for server in plan.servers] == [server["group_port"] for server in servers]
    for server in plan.servers:
        assert server.process is not None
        assert activated_config(server.process.environment) == resolved_rollout(config).repeat_terminate
    assert plan.repeat_terminate == contract["repeat_terminate"]
    assert plan.api_key_env == contract["vllm"]["server"]["api_key_env"]
    for index in range(2):
        engine = dict(serve_options(config, index, None, 0).engine)
        assert {key: engine[key] for key in ("dtype", "max_model_len")} == {
            key: contract["vllm"][key] for key in ("dtype", "max_model_len")
        }


@pytest.mark.scenario("Preflight/runtime consume a shared validated rollout contract")
def test_launcher_and_trainer_raise_the_same_error_for_a_wrong_file(tmp_path: Path) -> None:
    """All of them use the schema; no consumer has its own list of keys."""
    raw = set_key(stage2(), "rollout_matching.vllm.server", {"servers": [SERVERS[0] | {"unknown_flag": 1}]})
    path = str(write_yaml(tmp_path, raw))
    commands = (["train", path], ["launch", "--dry-run", "--config", path], ["serve", "--config", path])
    refusals = {str(CliRunner().invoke(app, command).exception) for command in commands}
    assert len(refusals) == 1
    assert "rollout_matching.vllm.server.servers[0].unknown_flag" in refusals.pop()


# -- where the repeat guard's server contract ends ---------------------------------------------------------------------

GUARD = {"enabled": True, "ngram_size": 8}


def colocated(folder: Path, **repeat_terminate: Any) -> Any:
    config = server_config(folder, checkpoint=tiny_checkpoint())
    config = set_key(config, "rollout_matching.vllm", {"mode": "colocate", "tensor_parallel_size": 1})
    config = set_key(config, "rollout_matching.decoding.skip_forced_tokens", False)  # then arguments name the guard
    return load_config(write_yaml(folder, set_key(config, "rollout_matching.repeat_terminate", repeat_terminate)))


def engine_arguments(run: Any) -> dict[str, Any]:
    unused: Any = None
    rollout = resolved_rollout(run)
    trainer = TrainerParts(unused, unused, 0, unused, tiny_checkpoint(), unused)
    return ColocatedBackend(rollout, trainer, decoding_options(rollout)).engine_arguments


@needs("vllm")
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
        assert plan.servers == () and not {ENABLE, CONFIG_JSON} & set(plan.trainer.environment)
    arguments = engine_arguments(plain)
    assert GUARD_PROCESSOR not in arguments["logits_processors"]
    disabled = colocated(tmp_path, **{**GUARD, "enabled": False})
    assert engine_arguments(disabled) == arguments
