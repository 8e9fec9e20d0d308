"""The environment of engine processes: what is set is kept, and the guard is the configuration's or nothing starts."""

from __future__ import annotations

import pytest

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.errors import RolloutError
from coordexp.serving.serve.run import prepare_environment
from coordexp.vllm_engine.cpu import engine_environment
from coordexp.vllm_engine.guard_activation import ENABLE, activated_config, activation_environment

GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=7)


def test_variables_that_are_set_are_kept() -> None:
    environment = engine_environment({"OMP_WAIT_POLICY": "active", "HOME": "/h"}, gpu=False)
    assert environment["OMP_WAIT_POLICY"] == "active" and environment["HOME"] == "/h"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment({}, gpu=True)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    clean: dict[str, str] = {"HOME": "/h"}
    monkeypatch.setattr("os.environ", clean)
    return clean


def test_the_yaml_alone_switches_the_guard_on(environment: dict[str, str]) -> None:
    prepare_environment(GUARD, gpu=False)
    assert activated_config(environment) == GUARD


def test_a_launcher_that_says_the_same_is_welcome(environment: dict[str, str]) -> None:
    environment.update(activation_environment(GUARD))
    prepare_environment(GUARD, gpu=False)
    assert activated_config(environment) == GUARD


@pytest.mark.parametrize(
    "variables",
    [activation_environment(RepeatTerminateConfig(enabled=True, min_new_tokens=8)), {ENABLE: "0"}],
    ids=["other thresholds", "off"],
)
def test_a_guard_that_is_not_the_configurations_is_refused(
    environment: dict[str, str], variables: dict[str, str]
) -> None:
    environment.update(variables)
    with pytest.raises(RolloutError, match="repeat_terminate"):
        prepare_environment(GUARD, gpu=False)


def test_a_guard_that_nobody_configured_is_refused(environment: dict[str, str]) -> None:
    environment.update(activation_environment(GUARD))
    with pytest.raises(RolloutError, match="repeat_terminate"):
        prepare_environment(RepeatTerminateConfig(), gpu=False)
