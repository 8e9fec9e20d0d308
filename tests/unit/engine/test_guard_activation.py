"""How a server's repeat guard is configured, and how the trainer checks that it is active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.wire.arguments import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    ENABLE,
    GUARD_PROCESSOR,
    KNOWN_TOKENS_PROCESSOR,
    activated_config,
    activation_environment,
    check_guard,
    with_processors,
)
from coordexp.errors import RolloutError

WHOLE: dict[str, Any] = {
    "enabled": True, "min_new_tokens": 10, "max_consecutive_token_repeats": 8, "ngram_size": 16, "ngram_repeats": 3,
    "max_object_keys": 40,
}  # fmt: skip
CONFIG = RepeatTerminateConfig(**WHOLE)


def environment(data: Any) -> dict[str, str]:
    return {ENABLE: "1", CONFIG_JSON: data if isinstance(data, str) else json.dumps(data)}


def test_all_six_guard_keys_reach_the_server() -> None:
    sent = activation_environment(CONFIG)
    assert sent[ENABLE] == "1"
    assert json.loads(sent[CONFIG_JSON]) == WHOLE
    assert activated_config(sent) == CONFIG
    defaults = RepeatTerminateConfig(enabled=True)
    assert activated_config(activation_environment(defaults)) == defaults


def test_a_disabled_guard_sets_nothing() -> None:
    assert activation_environment(RepeatTerminateConfig()) == {}
    assert activated_config({}) is None
    assert activated_config(environment({**WHOLE, "enabled": False})) is None
    assert activated_config({ENABLE: "0", CONFIG_JSON: "not read"}) is None


def test_the_section_can_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    path.write_text(json.dumps(WHOLE))
    assert activated_config({ENABLE: "1", CONFIG_JSON_PATH: str(path)}) == CONFIG
    config = activated_config(environment(without("max_object_keys")))  # the one key that may be left out
    assert config is not None and config.max_object_keys is None


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in WHOLE.items() if key not in keys}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({ENABLE: "yes"}, "write 1"),
        ({ENABLE: "1"}, "one of .* and .*; 0 are set"),
        ({ENABLE: "1", CONFIG_JSON: "{}", CONFIG_JSON_PATH: "x"}, "2 are set"),
        ({ENABLE: "1", CONFIG_JSON_PATH: "/does/not/exist.json"}, "cannot be read"),
        (environment("{not json"), "cannot be read"),
        (environment("[1]"), "lacks enabled"),
        (environment("{}"), "lacks enabled, min_new_tokens"),
        (environment(without("ngram_size", "ngram_repeats")), "lacks ngram_size, ngram_repeats"),
        (environment({**WHOLE, "ngram_sise": 3}), "ngram_sise: unknown key; did you mean 'ngram_size'"),
        (environment({**WHOLE, "ngram_size": "16"}), "ngram_size: "),
        (environment({**WHOLE, "min_new_tokens": -1}), "min_new_tokens: "),
    ],
)
def test_a_wrong_activation_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        activated_config(given)


def worker(active: bool, config: RepeatTerminateConfig | None) -> dict[str, Any]:
    return {"repeat_terminate": {"active": active, "config": None if config is None else config.model_dump()}}


OTHER = CONFIG.model_copy(update={"ngram_size": 17})


@pytest.mark.parametrize(
    ("workers", "wanted", "fits"),
    [
        ([worker(True, CONFIG)], CONFIG, True),
        ([worker(True, CONFIG)] * 2, CONFIG, True),
        ([worker(False, None)], None, True),
        ([worker(False, None)], RepeatTerminateConfig(), True),  # disabled is the same as absent
        ([worker(False, None)], CONFIG, False),  # dropped
        ([worker(True, CONFIG), worker(False, None)], CONFIG, False),  # dropped by one of two
        ([worker(True, OTHER)], CONFIG, False),  # other thresholds
        ([worker(True, CONFIG)], None, False),  # guarded although the configuration says no
        ([worker(False, CONFIG)], CONFIG, False),
        ([{}], CONFIG, False),  # a worker without guard support
        ([], None, False),
    ],
)
def test_the_trainer_accepts_only_its_own_guard(
    workers: list[dict[str, Any]], wanted: RepeatTerminateConfig | None, fits: bool
) -> None:
    if fits:
        check_guard(workers, wanted)
        return
    with pytest.raises(RolloutError) as caught:
        check_guard(workers, wanted)
    assert not workers or all(part in str(caught.value) for part in (ENABLE, "external_plugins", "coordexp serve"))


def test_the_guard_is_the_last_processor_of_an_engine() -> None:
    arguments = with_processors({"logits_processors": ["theirs"], "seed": 3}, guarded=True)
    assert arguments["logits_processors"] == ["theirs", KNOWN_TOKENS_PROCESSOR, GUARD_PROCESSOR]
    assert arguments["seed"] == 3
