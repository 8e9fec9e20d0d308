"""The environment of engine processes: set variables are kept; a guard other than the configuration's is refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.arguments import ENABLE, activated_config, activation_environment
from coordexp.engine.engine_process import PLUGINS, engine_environment, needed_plugins
from coordexp.engine.serve import prepare_environment
from coordexp.errors import RolloutError

GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=7)


def test_set_variables_are_kept() -> None:
    environment = engine_environment({"OMP_WAIT_POLICY": "active", "HOME": "/h"}, gpu=False)
    assert environment["OMP_WAIT_POLICY"] == "active" and environment["HOME"] == "/h"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    on_gpu = engine_environment({}, gpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu and on_gpu["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


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
