"""DriftWatch warns once when truncated answers or duplicates rise, and a resumed run warns as an uninterrupted one."""

from __future__ import annotations

import logging

import pytest

from coordexp.training.progress import DriftWatch

Line = dict[str, float]


def line(samples: int = 16, truncated: int = 0, duplicates: int = 0, predicted: int = 48, length: float = 60) -> Line:
    return {
        "rollout/samples_total": samples,
        "rollout/parse_truncated_total": truncated,
        "rollout/valid_pred_objects_total": predicted,
        "rollout/duplicates_total": duplicates,
        "rollout/gen_new_tokens_total": samples * length,
        "loss": 1.0,
    }


CALM = [line(truncated=i % 2) for i in range(8)]  # 128 answers, 3 % truncated: the first window


def observe(lines: list[Line]) -> list[dict[str, float]]:
    watch = DriftWatch()
    return [watch.observe(one, step) for step, one in enumerate(lines, start=1)]


@pytest.mark.parametrize(
    ("worse", "rate", "said"),
    [
        (line(truncated=6), "safeguard/truncated_rate", "answers are truncated, 3% at first"),
        (line(duplicates=8), "safeguard/duplicate_rate", "objects repeat an earlier one, 0% at first"),
    ],
)
def test_each_rise_warns_once(worse: Line, rate: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = observe([*CALM, *[worse] * 20])
    (warning,) = caplog.messages
    step = next(at for at, metrics in enumerate(seen, start=1) if metrics[rate] >= seen[7][rate] + 0.10)
    assert warning.startswith(f"step {step}: ") and said in warning


@pytest.mark.parametrize(
    "lines",
    [
        [line(truncated=i % 3, duplicates=i % 4) for i in range(40)],
        [line(length=300)] * 40,  # the demo's answers grow, which is their purpose
        [{"loss": 1.0}],
    ],
)
def test_noise_and_longer_answers_are_not_drift(lines: list[Line], caplog: pytest.LogCaptureFixture) -> None:
    observe([*CALM, *lines])
    assert not caplog.messages


def test_lines_without_rollouts_are_not_counted() -> None:
    mixed = [one for worse in [line(truncated=6)] * 9 for one in ({"loss": 1.0}, worse)]
    seen = observe([*CALM, *mixed])
    assert seen[8::2] == [{}] * 9
    assert [metrics for metrics in seen if metrics] == observe([*CALM, *[line(truncated=6)] * 9])


@pytest.mark.parametrize("step", range(0, 30, 3))
def test_drift_warnings_are_the_same_when_resumed_at_any_step(step: int, caplog: pytest.LogCaptureFixture) -> None:
    lines = [*CALM, *[line(truncated=min(16, i)) for i in range(12)], *CALM, {"eval_rollout/f1": 0.4}, line()]
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        whole = observe(lines)
        said = [one for one in caplog.messages if int(one.split()[1].rstrip(":")) > step]
        caplog.clear()
        resumed = DriftWatch()
        resumed.replay(lines[:step])
        assert [resumed.observe(one, at + 1) for at, one in enumerate(lines) if at >= step] == whole[step:]
    assert caplog.messages == said


def test_the_window_has_128_answers() -> None:
    seen = observe([*[line(truncated=16)] * 8, *[line()] * 8])
    assert seen[7]["safeguard/truncated_rate"] == 1.0
    assert [m["safeguard/truncated_rate"] for m in seen[8:]] == [k / 8 for k in range(7, -1, -1)]
