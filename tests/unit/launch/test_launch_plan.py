"""What ``coordexp launch`` would start: from the validated configuration alone, before anything runs."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordexp.checkpoints.memory import check_memory
from coordexp.config import load_config
from coordexp.engine.wire.arguments import CONFIG_JSON, ENABLE
from coordexp.errors import ConfigError
from coordexp.launch.plan import PLAN_JSON, Check, LaunchPlan, plan_launch, run_checks
from support.cli_runs import Cli
from support.config_samples import set_key, set_keys, write_yaml
from support.installed import needs
from support.rollout_servers import GUARD, guarded_config
from support.tiny_run import tiny_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    config = guarded_config(tmp_path, "swift", num_servers=2, checkpoint=tiny_checkpoint())
    return set_key(config, "training.save_strategy", "no")


def planned(folder: Path, config: dict[str, Any], local: tuple[bool, ...] = (True, True), **keys: Any) -> LaunchPlan:
    path = write_yaml(folder, set_keys(config, keys))
    return plan_launch(load_config(path), path, local=local)


def check_named(name: str, folder: Path, config: dict[str, Any], num_gpus: int = 0) -> Check:
    path = write_yaml(folder, config)
    run = load_config(path)
    (check,) = [one for one in run_checks(run, plan_launch(run, path), num_gpus) if one.name == name]
    return check


def test_the_guard_section_reaches_only_the_server(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = planned(tmp_path, config)
    for server in plan.servers:
        assert server.process is not None
        assert server.process.environment[ENABLE] == "1"
        assert json.loads(server.process.environment[CONFIG_JSON]) == {**GUARD, "max_object_keys": None}
    assert ENABLE not in plan.trainer.environment
    off = planned(tmp_path, config, rollout_matching__repeat_terminate__enabled=False)
    assert all(server.process is not None and ENABLE not in server.process.environment for server in off.servers)


def test_swift_is_started_with_only_the_plugin_and_the_yaml(tmp_path: Path, config: dict[str, Any]) -> None:
    engine_args = {"max_num_batched_tokens": 2048, "block_size": 32, "max_num_seqs": 8}
    (first, _) = planned(tmp_path, config, rollout_matching__vllm__engine_args=engine_args).servers
    assert first.process is not None
    words = first.process.command
    flags = {words[i]: words[i + 1] for i in range(3, len(words), 2)}
    assert words[1:3] == ("-m", "swift.cli.rollout")
    assert Path(flags["--external_plugins"]).name == "coordexp_rollout_plugin.py"
    assert Path(flags["--external_plugins"]).is_file()
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", first.base_url.rsplit(":", 1)[1])
    assert flags["--vllm_use_async_engine"] == "false" and flags["--torch_dtype"] == "float32"
    assert flags["--vllm_max_model_len"] == "512"
    assert json.loads(flags["--vllm_engine_kwargs"]) == {"max_num_batched_tokens": 2048, "block_size": 32}
    assert (flags["--vllm_max_num_seqs"], flags["--vllm_enable_prefix_caching"]) == ("8", "true")
    assert json.loads(flags["--vllm_limit_mm_per_prompt"]) == {"image": 1, "video": 0}


def test_the_yaml_selects_the_server_program(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = planned(tmp_path, config, launch__server="coordexp")
    commands = [server.process.command for server in plan.servers if server.process is not None]
    assert [command[1:4] for command in commands] == [("-m", "coordexp", "serve")] * 2
    assert [command[-2:] for command in commands] == [("--index", "0"), ("--index", "1")]


def with_entry(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    first, *others = config["rollout_matching"]["vllm"]["server"]["servers"]
    return set_key(config, "rollout_matching.vllm.server.servers", [{**first, **keys}, *others])


@pytest.mark.parametrize(
    ("keys", "host", "started"),
    [
        ({}, None, [True, True]),
        ({"base_url": "http://203.0.113.9:8000"}, None, [False, True]),  # reserved for documentation, so on no machine
        ({"base_url": "http://203.0.113.9:8000", "listen_host": "127.0.0.2"}, None, [True, True]),
        ({"base_url": "http://203.0.113.9:8000", "listen_host": "0.0.0.0"}, None, [False, True]),
        ({"base_url": "http://203.0.113.9:8000"}, "127.0.0.3", [True, True]),
    ],
)
def test_a_server_is_started_only_if_its_address_is_local(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], host: str | None,
    started: list[bool],
) -> None:  # fmt: skip
    monkeypatch.setenv("ROLLOUT_TOKEN", "secret-of-servers")
    config = set_key(with_entry(config, **keys), "rollout_matching.vllm.server.api_key_env", "ROLLOUT_TOKEN")
    config = set_key(config, "launch.server", "coordexp")
    path = write_yaml(tmp_path, config)
    plan = plan_launch(load_config(path), path, listen_host=host)
    assert [server.process is not None for server in plan.servers] == started
    if host is not None:
        commands = [server.process.command for server in plan.servers if server.process is not None]
        assert [command[-2:] for command in commands] == [("--host", host)] * 2
        assert {server.listen_host for server in plan.servers} == {host}
    assert b"\n" not in PLAN_JSON.dump_json(plan) and PLAN_JSON.validate_json(PLAN_JSON.dump_json(plan)) == plan


def test_swift_listens_on_the_configured_host(tmp_path: Path, config: dict[str, Any]) -> None:
    (first, _) = planned(tmp_path, with_entry(config, listen_host="127.0.0.2")).servers
    assert first.process is not None
    assert first.process.command[first.process.command.index("--host") + 1] == "127.0.0.2"


def test_an_address_of_another_machine_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    path = write_yaml(tmp_path, set_key(config, "launch.server", "coordexp"))
    run = load_config(path)
    plan = plan_launch(run, path, listen_host="127.0.0.2")
    assert not any("not an address" in str(check.problem) for check in run_checks(run, plan, 0))
    servers = tuple(replace(server, listen_host="203.0.113.9") for server in plan.servers)
    problems = [check.problem for check in run_checks(run, replace(plan, servers=servers), 0)]
    assert sum("203.0.113.9 is not an address" in str(problem) for problem in problems) == 4


def test_a_missing_token_is_reported_before_anything_starts(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = [{"base_url": "http://203.0.113.9:8000", "group_port": 51216}]
    config = set_key(config, "rollout_matching.vllm.server.servers", elsewhere)
    config = set_key(set_key(config, "launch.server_devices", []), "launch.learner_devices", [0])
    config = set_key(config, "rollout_matching.vllm.server.api_key_env", "THE_TOKEN")
    monkeypatch.delenv("THE_TOKEN", raising=False)
    assert "THE_TOKEN is not set" in str(check_named("token of the servers", tmp_path, config, 4).problem)
    monkeypatch.setenv("THE_TOKEN", "secret")
    found = check_named("token of the servers", tmp_path, config, 4)
    assert found.problem is None and "secret" not in found.outcome


def test_command_line_keys_reach_every_program(tmp_path: Path, config: dict[str, Any]) -> None:
    path = write_yaml(tmp_path, set_key(config, "launch.server", "coordexp"))
    words = ("training.max_steps=3", "rollout_matching.vllm.max_model_len=4096")
    given = load_config(path, arguments=words)
    made = plan_launch(given, path, local=(True, True), arguments=words)
    processes = [made.trainer, *(server.process for server in made.servers if server.process is not None)]
    assert len(processes) == 3
    for process in processes:
        at = process.command.index(str(path))
        assert process.command[at + 1 : at + 3] == words


def test_devices_give_data_parallel_engines_and_trainer_processes(tmp_path: Path, config: dict[str, Any]) -> None:
    keys = {"launch__server_devices": [[0, 1, 2, 3], [4, 5]], "launch__learner_devices": [6, 7]}
    plan = planned(tmp_path, config, **keys, rollout_matching__vllm__tensor_parallel_size=2)
    processes = [server.process for server in plan.servers if server.process is not None]
    engines = [one.command[one.command.index("--vllm_data_parallel_size") + 1] for one in processes]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in processes] == ["0,1,2,3", "4,5"]
    assert engines == ["2", "1"]
    assert plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "--nproc-per-node=2" in plan.trainer.command and "--rdzv-conf=store_type=file" in plan.trainer.command


def test_devices_are_those_of_the_gpus_that_are_visible(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the machine may be another user's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-6b1c,7")
    plan = planned(tmp_path, config, launch__server_devices=[[0, 1], [2]], launch__learner_devices=[3])
    servers = [server.process.environment["CUDA_VISIBLE_DEVICES"] for server in plan.servers if server.process]
    assert servers == ["4,5", "GPU-6b1c"] and plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == "7"
    assert plan.trainer.devices == (3,)  # as the YAML numbers them, and the checks


def test_variables_of_the_shell_stay_those_of_the_servers(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    for server in planned(tmp_path, config).servers:
        assert server.process is not None
        assert server.process.environment.get("VLLM_CPU_KVCACHE_SPACE", "8") == "8"
        assert server.process.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("servers", "trainer", "tensor_parallel_size", "message"),
    [
        ([[0], [0]], [1], 1, "device 0 is already in"),
        ([[0], [1]], [1], 1, "learner_devices: device 1 is already"),
        ([[0]], [1], 1, "1 lists of devices for 2 servers"),
        ([[0], [1]], [], 1, "launch.learner_devices: missing"),
        ([[0], []], [1], 1, r"server_devices\[1\]: missing"),
        ([[0], [1]], [2], 2, "tensor_parallel_size 2"),
        ([[0, 1, 2], [3, 4]], [5], 2, r"server_devices\[0\]: 0, 1, 2 cannot be shared out.*name a multiple of 2"),
    ],
)
def test_devices_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], servers: Any, trainer: Any, tensor_parallel_size: int, message: str
) -> None:
    keys = {"launch__server_devices": servers, "launch__learner_devices": trainer}
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, config, **keys, rollout_matching__vllm__tensor_parallel_size=tensor_parallel_size)


def test_the_multi_node_configuration_can_be_launched() -> None:
    path = Path(__file__).parents[3] / "configs" / "stage2_rollout_aligned" / "server_multi_node.yaml"
    plan = plan_launch(load_config(path), path)
    assert [server.process for server in plan.servers] == [None, None]  # started on their own machines
    assert plan.trainer.devices == (0, 1, 2, 3, 4, 5, 6, 7) and "--nproc-per-node=8" in plan.trainer.command


def test_without_servers_only_the_trainer_is_started(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = planned(tmp_path, config, local=(), rollout_matching__rollout_backend="hf")
    assert plan.servers == () and plan.server_base_urls == ()


def test_the_model_is_a_checkpoint_that_coordexp_trains(tmp_path: Path, config: dict[str, Any]) -> None:
    (other := tmp_path / "llama").mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    check = check_named("model.model", tmp_path, set_key(config, "model.model", str(other)))
    assert "model type 'llama'; CoordExp trains 'qwen3_vl' checkpoints" in str(check.problem)
    (adapters := tmp_path / "lora").mkdir()
    base = {"base_model_name_or_path": str(tiny_checkpoint()), "r": 4, "peft_type": "LORA"}
    (adapters / "adapter_config.json").write_text(json.dumps(base))
    config = set_key(config, "model.model", str(adapters))
    ours, swifts = (set_key(config, "launch.server", server) for server in ("coordexp", "swift"))
    assert check_named("model.model", tmp_path, ours) == Check("model.model", str(adapters))
    check = check_named("model.model", tmp_path, swifts)
    assert "has adapters, and swift rollout starts with a whole model only" in str(check.problem)


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
@pytest.mark.parametrize(("server", "refused"), [("swift", True), ("coordexp", False)])
def test_swift_is_not_started_for_a_checkpoint_whose_code_it_would_run(
    file: str, server: str, refused: bool, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    config = set_key(set_key(config, "launch.server", server), "model.model", str(folder))
    check = check_named("model.model", tmp_path, config)
    assert (f"{file} there name Python code (auto_map)" in str(check.problem)) == refused


def test_a_token_is_never_part_of_a_plan(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    plan = planned(tmp_path, config, rollout_matching__vllm__server__api_key_env="MY_TOKEN")
    assert b"very-secret" not in PLAN_JSON.dump_json(plan)
    assert all(one.process is not None and list(one.process.secrets.values()) == ["MY_TOKEN"] for one in plan.servers)


def test_used_ports_missing_devices_and_full_disks_are_all_named(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = config["rollout_matching"]["vllm"]["server"]["servers"]
    servers[1]["group_port"] = servers[0]["group_port"]
    config = set_key(config, "launch.server_devices", [[0], [1]])
    config = set_key(config, "launch.learner_devices", [9])
    monkeypatch.setattr("coordexp.checkpoints.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    config = set_key(config, "training.save_strategy", "steps")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(servers[0]["base_url"].rsplit(":", 1)[1])))
        taken.listen()
        path = write_yaml(tmp_path, config)
        run = load_config(path)
        text = "\n".join(f"{one.name}: {one.problem}" for one in run_checks(run, plan_launch(run, path), 2))
    assert "device 9 does not exist" in text
    assert "servers[0].base_url" in text and "is taken" in text
    assert "servers[1].group_port" in text and "give each its own" in text
    assert "has 0.0 MB left, and a checkpoint and the final model need about" in text


def test_more_trainers_than_answers_at_once_are_refused_before_servers_start(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    config = set_key(set_key(config, "launch.server_devices", [[0], [1]]), "launch.learner_devices", [2, 3, 4])
    key = "rollout_matching.decode_batch_size"
    two, one = (check_named(key, tmp_path, set_key(config, key, size), 5) for size in (2, 1))
    assert two == Check(key, "2 answers at once on each of 2 rollout devices", None)
    assert "2 requests at a time, fewer than the 3 trainer ranks" in str(one.problem)


def test_a_gpu_that_is_too_small_is_refused_with_a_size_that_fits(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = set_key(set_key(config, "launch.server_devices", [[0], [1]]), "launch.learner_devices", [2, 3])
    config = set_key(config, "training.use_cpu", False)
    estimate = str(check_memory(load_config(write_yaml(tmp_path, config)), 2))
    sizes = {2: 10**12, 3: 10}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=sizes[device]))
    small = check_named("memory", tmp_path, config, 4)
    assert small.outcome == "too little" and f"needs about {estimate}, and this GPU has 0 GB" in str(small.problem)
    sizes[3] = 10**12
    assert check_named("memory", tmp_path, config, 4) == Check("memory", estimate)


@needs("vllm", "swift")
def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, config: dict[str, Any], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a rank that an earlier job left, or in pods of Kubeflow: later ranks print nothing."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    path = write_yaml(tmp_path, config)
    result = cli("launch", "--config", path, "--dry-run")
    assert result.code == 0, result.err
    urls = [entry["base_url"] for entry in config["rollout_matching"]["vllm"]["server"]["servers"]]
    assert f"server_base_urls: {', '.join(urls)}" in result.out
    for word in ("swift.cli.rollout", "torch.distributed.run", ENABLE, "CUDA_VISIBLE_DEVICES", "server1.log"):
        assert word in result.out
    assert "ok memory: " in result.out
    assert not Path(config["training"]["output_dir"]).exists()


@needs("vllm", "swift")
def test_a_printed_plan_can_be_pasted_into_a_shell(tmp_path: Path, config: dict[str, Any], cli: Cli) -> None:
    """Each command with its variables; a variable on a line of its own would not reach the program."""
    config = set_key(config, "training.output_dir", str(tmp_path / "it's $HOME"))
    result = cli("launch", "--config", write_yaml(tmp_path, config), "--dry-run", "template.prompt=a $HOME")
    assert result.code == 0, result.err
    block = result.out.split("trainer on the CPU")[1].split("\n", 1)[1]
    shows = "import os, sys; print(os.environ['OMP_WAIT_POLICY'], sys.argv[-1])"
    pasted = block.replace(" -m torch.distributed.run", f" -c {shlex.quote(shows)}")
    ran = subprocess.run(["bash"], input=pasted, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "passive template.prompt=a $HOME\n", ran.stderr


@needs("vllm")
def test_launch_passes_the_listen_hosts_to_servers(tmp_path: Path, config: dict[str, Any], cli: Cli) -> None:
    path = write_yaml(tmp_path, set_key(config, "launch.server", "coordexp"))
    result = cli("launch", "--config", path, "--dry-run", "--host", "127.0.0.2")
    assert result.code == 0, result.err
    assert result.out.count("--host 127.0.0.2") == 2 and "127.0.0.2:" in result.out
    open_to_all = cli("launch", "--config", path, "--dry-run", "--host", "0.0.0.0")
    assert open_to_all.code == 2 and "0.0.0.0 can be reached from other machines" in open_to_all.err


@pytest.mark.parametrize("dry", [True, False])
def test_all_problems_are_printed_and_nothing_starts(
    tmp_path: Path, config: dict[str, Any], cli: Cli, dry: bool
) -> None:
    """Devices, ports, the model's folder, its tokenizer and the data are all checked, even if one is wrong."""
    servers = config["rollout_matching"]["vllm"]["server"]["servers"]
    servers[1]["group_port"] = servers[0]["group_port"]
    broken = {
        "launch.server_devices": [[0], [0]],
        "launch.learner_devices": [],
        "model.model": str(tmp_path / "nowhere"),
        "custom.train_jsonl": str(tmp_path / "no.jsonl"),
        "custom.val_jsonl": str(tmp_path / "neither.jsonl"),
    }
    config = set_keys(config, broken)
    result = cli("launch", "--config", write_yaml(tmp_path, config), *["--dry-run"] * dry)
    assert result.code == 2
    for words in (
        "launch.server_devices[1]: device 0 is already in launch.server_devices[0]",
        "launch.learner_devices: missing, while servers have devices",
        f"model.model: {tmp_path / 'nowhere'}: no such folder",
        f"port {servers[0]['group_port']} is rollout_matching.vllm.server.servers[0].group_port too",
        "no.jsonl",
        "neither.jsonl",
    ):
        assert words in result.err, words
    assert not Path(config["training"]["output_dir"]).exists()
