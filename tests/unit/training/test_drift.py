"""The watch over rollouts: it speaks once when answers get worse, and a resumed run sees what the whole run saw."""

from __future__ import annotations

import logging

import pytest

from coordexp.training.drift import DriftWatch

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
    ("worse", "flag", "says"),
    [
        (
            line(truncated=6),
            "safeguard/truncated_drift",
            "of the last 128 answers are truncated (in the run's first window 3%)",
        ),
        (
            line(duplicates=8),
            "safeguard/duplicate_drift",
            "of the objects in the last 128 answers repeat an earlier one (in the run's first window 0%)",
        ),
        (line(length=100), "safeguard/length_drift", "tokens on average (in the run's first window 60)"),
        (line(length=20), "safeguard/length_drift", "tokens on average (in the run's first window 60)"),
    ],
)
def test_each_drift_is_recorded_and_said_once(
    worse: Line, flag: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        seen = observe([*CALM, *[worse] * 20])
    flags = [metrics[flag] for metrics in seen]
    assert flags[:8] == [0.0] * 8 and flags[-12:] == [1.0] * 12
    assert all(value in (0.0, 1.0) for value in flags)
    (warning,) = [record for record in caplog.records if "Rollouts drift" in record.getMessage()]
    first = flags.index(1.0) + 1
    assert warning.getMessage().startswith(f"step {first}: ") and f"metric {flag} is 1" in warning.getMessage()
    others = {name for name in seen[-1] if name.endswith("_drift")} - {flag}
    assert all(metrics[name] == 0.0 for metrics in seen for name in others)
    assert says in warning.getMessage()


def test_noise_around_the_first_window_is_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        seen = observe([*CALM, *[line(truncated=i % 3, duplicates=i % 4, length=50 + 5 * (i % 6)) for i in range(40)]])
    assert not caplog.records
    assert not any(value for metrics in seen for name, value in metrics.items() if name.endswith("_drift"))


def test_a_drift_that_recovers_may_be_said_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="coordexp"):
        observe([*CALM, *[line(truncated=6)] * 10, *CALM, *[line(truncated=6)] * 10])
    said = ["back towards" if "back towards" in record.getMessage() else "drift" for record in caplog.records]
    assert said == ["drift", "back towards", "drift"]


def test_hovering_at_the_threshold_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """12 % and 14 % in turn, against 3 % + 10 %."""
    hover = [line(samples=64, truncated=8 if i % 2 else 9) for i in range(30)]
    with caplog.at_level(logging.INFO, logger="coordexp"):
        observe([*CALM, *hover])
    assert len(caplog.records) == 1


def test_lines_without_rollouts_say_nothing_and_take_no_place() -> None:
    mixed = [one for worse in [line(truncated=6)] * 9 for one in ({"loss": 1.0}, worse)]
    seen = observe([*CALM, *mixed])
    assert seen[8::2] == [{}] * 9
    assert [metrics for metrics in seen if metrics] == observe([*CALM, *[line(truncated=6)] * 9])


@pytest.mark.parametrize("step", range(0, 30, 3))
def test_resumed_at_any_step_the_watch_says_the_same(step: int, caplog: pytest.LogCaptureFixture) -> None:
    lines = [*CALM, *[line(truncated=min(16, i)) for i in range(12)], *CALM, {"eval_rollout/f1": 0.4}, line(length=200)]
    whole = observe(lines)
    caplog.clear()
    resumed = DriftWatch()
    resumed.replay(lines[:step])
    assert not caplog.records
    assert [resumed.observe(one, at + 1) for at, one in enumerate(lines) if at >= step] == whole[step:]


def test_the_window_holds_what_it_says() -> None:
    seen = observe([*[line(truncated=16)] * 8, *[line()] * 8])
    assert seen[7]["safeguard/truncated_rate"] == 1.0
    assert [metrics["safeguard/truncated_rate"] for metrics in seen[8:]] == [7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8,
                                                                            1 / 8, 0.0]  # fmt: skip
