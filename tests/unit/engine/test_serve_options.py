"""One YAML for trainer and servers: keys that ``coordexp serve`` uses, refused settings, its environment."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import RunConfig, load_config
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.server.options import ServeOptions, is_loopback, serve_options
from coordexp.engine.server.serving import prepare_environment
from coordexp.engine.wire.arguments import (
    ENABLE,
    activated_config,
    activation_environment,
    own_arguments,
    with_room_for_drafts,
)
from coordexp.engine.wire.engine_process import PLUGINS, engine_environment, needed_plugins
from coordexp.errors import ConfigError, RolloutError
from support.config_samples import set_key, stage2, write_yaml

SERVERS = [
    {"base_url": "http://127.0.0.1:8000", "group_port": 51216},
    {"base_url": "http://127.0.0.1:8001", "group_port": 51217},
]


def config_of(folder: Path, **keys: Any) -> RunConfig:
    config = stage2(rollout_backend="vllm", vllm={"mode": "server", "server": {"servers": SERVERS}})
    config["rollout_matching"]["vllm"]["tensor_parallel_size"] = 1
    for key, value in keys.items():
        config = set_key(config, "rollout_matching.vllm." + key.replace("__", "."), value)
    return load_config(write_yaml(folder, config))


def options_of(folder: Path, index: int = 0, replicas: int | None = None, gpus: int = 0, **keys: Any) -> ServeOptions:
    return serve_options(config_of(folder, **keys), index, replicas, gpus)


def test_an_entry_becomes_an_address_and_engine_arguments(tmp_path: Path) -> None:
    options = options_of(
        tmp_path, 1, dtype="float32", gpu_memory_utilization=0.5, engine_args={"block_size": 32, "max_num_seqs": 5}
    )
    assert (options.host, options.port, options.group_port) == ("127.0.0.1", 8001, 51217)
    assert options.engine["dtype"] == "float32" and options.engine["max_num_seqs"] == 5
    assert options.engine["gpu_memory_utilization"] == 0.5 and options.engine["block_size"] == 32
    assert options.engine["max_model_len"] == 2048  # global_max_length
    assert "kv_cache_dtype" not in options.engine and "enable_lora" not in options.engine


@pytest.mark.parametrize(
    ("gpus", "keys", "tokens"), [(1, {}, 16_384), (1, {"max_num_batched_tokens": 512}, 512), (0, {}, None)]
)
def test_engines_on_gpus_read_many_prompts_in_a_step(
    gpus: int, keys: dict[str, int], tokens: int | None, tmp_path: Path
) -> None:
    engine = options_of(tmp_path, gpus=gpus, tensor_parallel_size=1, engine_args=keys).engine
    assert engine.get("max_num_batched_tokens") == tokens


def test_a_server_skips_forced_tokens_unless_its_engine_is_to_schedule_asynchronously(tmp_path: Path) -> None:
    assert options_of(tmp_path).skip_forced_tokens
    assert not options_of(tmp_path, engine_args={"async_scheduling": True}).skip_forced_tokens


def test_adapters_in_float32_are_refused_on_gpus(tmp_path: Path) -> None:
    """vLLM's kernels assert half precision, without a message."""
    one: dict[str, Any] = {"gpus": 1, "tensor_parallel_size": 1, "enable_lora": True, "max_lora_rank": 16}
    with pytest.raises(ConfigError, match=r"vllm\.dtype: float32 .* adapters on GPUs; write bfloat16"):
        options_of(tmp_path, **one, dtype="float32")
    accepted: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"gpus": 0, "dtype": "float32"}]
    for keys in accepted:
        engine = options_of(tmp_path, **one | keys).engine
        assert (engine["enable_lora"], engine["max_loras"], engine["max_lora_rank"]) == (True, 1, 16)


@pytest.mark.parametrize(
    ("gpus", "drafts", "adapters", "args", "sequences"),
    [
        (0, True, True, {}, 62),  # 62 drafts of 32 tokens, each after a token, are in vLLM's 2048
        (0, True, True, {"max_num_seqs": 8}, 8),
        (0, True, True, {"max_num_batched_tokens": 100}, 3),
        (1, True, True, {"max_num_seqs": 500}, 496),
        (0, True, False, {}, None),
        (0, False, True, {}, None),
    ],
)
def test_an_engine_with_adapters_has_room_for_a_draft_of_each_answer(
    gpus: int, drafts: bool, adapters: bool, args: dict[str, Any], sequences: int | None, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine = options_of(tmp_path, gpus=gpus, tensor_parallel_size=1, enable_lora=adapters, engine_args=args).engine
    arguments = with_room_for_drafts({**engine, **own_arguments(tmp_path, guarded=False, drafts=drafts)})
    assert arguments.get("max_num_seqs") == sequences
    fewer = sequences is not None and args.get("max_num_seqs") != sequences
    assert (f"the engine answers {sequences} requests at once" in caplog.text) == fewer


def test_vllms_defaults_are_those_from_which_the_room_for_drafts_is_counted() -> None:
    config = pytest.importorskip("vllm.config").SchedulerConfig
    assert (config.DEFAULT_MAX_NUM_BATCHED_TOKENS, config.DEFAULT_MAX_NUM_SEQS) == (2048, 128)


@pytest.mark.parametrize(
    ("gpus", "tensor", "wanted", "engines"),
    [(0, 1, None, 1), (0, 1, 2, 2), (3, 1, None, 3), (4, 2, None, 2), (5, 2, None, 2), (4, 2, 1, 1)],
)
def test_engines_fill_the_visible_devices(
    tmp_path: Path, gpus: int, tensor: int, wanted: int | None, engines: int
) -> None:
    options = options_of(tmp_path, replicas=wanted, gpus=gpus, tensor_parallel_size=tensor)
    assert options.data_parallel_size == engines
    assert options.world_size == engines * tensor


@pytest.mark.parametrize(("gpus", "tensor", "wanted"), [(1, 4, None), (4, 2, 3)])
def test_missing_devices_are_named(tmp_path: Path, gpus: int, tensor: int, wanted: int | None) -> None:
    with pytest.raises(ConfigError, match=f"{gpus} are visible"):
        options_of(tmp_path, replicas=wanted, gpus=gpus, tensor_parallel_size=tensor)


@pytest.mark.parametrize(("engines", "tensor"), [(9, 1), (3, 4), (100_000, 1)])
def test_more_engines_than_a_cpu_has_cores_for_are_refused(
    engines: int, tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"processes; this CPU has 2 cores: start at most 8 \(--data-parallel-size\)"):
        options_of(tmp_path, replicas=engines, tensor_parallel_size=tensor)
    assert options_of(tmp_path, replicas=8).world_size == 8


def test_an_open_address_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_server = [{"base_url": "http://10.0.0.7:8000", "group_port": 51216}]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7.*overwrite its weights.*api_key_env"):
        options_of(tmp_path, server__servers=open_server)
    monkeypatch.setenv("ROLLOUT_TOKEN", "secret-of-servers")
    options = options_of(tmp_path, server__servers=open_server, server__api_key_env="ROLLOUT_TOKEN")
    assert options.api_key == "secret-of-servers" and "secret-of-servers" not in repr(options)


def test_an_encrypted_address_is_that_of_a_proxy(tmp_path: Path) -> None:
    """The server has no TLS; a launch would otherwise wait for it until launch.wait_s."""
    entry = {"base_url": "https://127.0.0.1:8000", "group_port": 51216}
    with pytest.raises(ConfigError, match=r"servers\[0\]\.base_url: https://127.0.0.1:8000 needs TLS.*write http://"):
        options_of(tmp_path, server__servers=[entry])
    options = options_of(tmp_path, server__servers=[{**entry, "listen_host": "127.0.0.2"}])
    assert (options.host, options.port) == ("127.0.0.2", 8000)


@pytest.mark.parametrize(
    ("host", "listen_host", "given", "listens_on"),
    [
        ("127.0.0.1", None, None, "127.0.0.1"),
        ("rollout-0.svc", "10.0.0.5", None, "10.0.0.5"),
        ("rollout-0.svc", "10.0.0.5", "0.0.0.0", "0.0.0.0"),
    ],
)
def test_the_listen_address_can_differ_from_the_url(
    host: str, listen_host: str | None, given: str | None, listens_on: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ROLLOUT_TOKEN", "secret-of-servers")
    entry = {"base_url": f"http://{host}:8000", "group_port": 51216, "listen_host": listen_host}
    config = config_of(tmp_path, server__servers=[entry], server__api_key_env="ROLLOUT_TOKEN")
    options = serve_options(config, 0, None, 0, given)
    assert (options.host, options.port, options.advertised_host) == (listens_on, 8000, host)


@pytest.mark.parametrize("listen_host", ["0.0.0.0", "::", "10.0.0.5"])
def test_listening_on_other_interfaces_needs_a_token(tmp_path: Path, listen_host: str) -> None:
    with pytest.raises(ConfigError, match=f"{listen_host} can be reached from other machines.*api_key_env"):
        options_of(tmp_path, server__servers=[{**SERVERS[0], "listen_host": listen_host}])


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "node7")))


@pytest.mark.parametrize(
    ("servers", "index", "message"),
    [
        (SERVERS, 2, r"has 2 entries, there is no \[2\]"),
        ([{"base_url": "http://127.0.0.1:8000/rollouts", "group_port": 1}], 0, "has a path"),
    ],
)
def test_invalid_server_entries_are_refused(tmp_path: Path, servers: Any, index: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(tmp_path, index, server__servers=servers)


# -- the environment of a server ---------------------------------------------------------------------------------------

GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=7)


def test_set_variables_are_kept() -> None:
    environment = engine_environment({"OMP_WAIT_POLICY": "active", "HOME": "/h"}, gpu=False)
    assert environment["OMP_WAIT_POLICY"] == "active" and environment["HOME"] == "/h"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    on_gpu = engine_environment({}, gpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu and on_gpu["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_without_flashinfer_vllm_samples_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports it otherwise, and its engine fails."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engine_environment({}, gpu=True)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment({}, gpu=True)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    clean: dict[str, str] = {"HOME": "/h"}
    monkeypatch.setattr("os.environ", clean)
    return clean


@pytest.mark.parametrize(
    ("installed", "needed"),
    [
        ([], ""),
        ([("swift_uembed", "swift.model.models.qwen:register", "general")], ""),
        ([("a", "swiftly.a:b", "general"), ("s", "swift.a:b", "general"), ("chip", "chip:c", "platform")], "a,chip"),
        ([("routes", "routes:add", "endpoint")], ""),  # only what is named here would be loaded of these
    ],
)
def test_engines_load_all_plugins_except_ms_swifts(
    installed: list[tuple[str, str, str]], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = EntryPoints(EntryPoint(name, value, f"vllm.{kind}_plugins") for name, value, kind in installed)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: entries)
    assert needed_plugins() == needed


def test_plugins_named_by_the_user_are_loaded(environment: dict[str, str]) -> None:
    environment[PLUGINS] = "mine"
    prepare_environment(GUARD, gpu=False)
    assert environment[PLUGINS] == "mine"


OTHER = RepeatTerminateConfig(enabled=True, min_new_tokens=8)


@pytest.mark.parametrize(
    ("variables", "configured", "agrees"),
    [
        ({}, GUARD, True),
        (activation_environment(GUARD), GUARD, True),  # a launcher that sets the same
        (activation_environment(OTHER), GUARD, False),
        ({ENABLE: "0"}, GUARD, False),
        (activation_environment(GUARD), RepeatTerminateConfig(), False),
    ],
    ids=["the YAML alone", "both", "other thresholds", "off", "the environment alone"],
)
def test_a_guard_that_differs_from_the_configuration_is_refused(
    environment: dict[str, str], variables: dict[str, str], configured: RepeatTerminateConfig, agrees: bool
) -> None:
    environment.update(variables)
    if agrees:
        prepare_environment(configured, gpu=False)
        assert activated_config(environment) == GUARD
    else:
        with pytest.raises(RolloutError, match="repeat_terminate"):
            prepare_environment(configured, gpu=False)
