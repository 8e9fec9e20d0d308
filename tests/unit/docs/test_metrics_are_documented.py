"""Every metric that a run emits stands in docs/metrics.md, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from cli_runs import small_checkpoint, write_run
from config_samples import stage2
from coordexp.config import load_config, parse_config
from coordexp.evaluation import detection_metrics
from coordexp.metrics.reduce import FLAGS, RATES
from coordexp.objective import MODULES, SupervisionCounts, build_pipeline
from coordexp.records import DropReason
from coordexp.training import rollout_dump

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented() -> set[str]:
    """First cells of the tables, ``<reason>`` expanded."""
    names = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(names) == len(set(names)), "a name stands twice"
    reasons = {reason.value for reason in DropReason}
    assert reasons <= set(names), "the table of reasons is incomplete"
    expanded = {name.replace("<reason>", reason) for name in names for reason in sorted(reasons)}
    return expanded - reasons


def from_registries() -> set[str]:
    """Names that the code declares, whether or not a short run emits them."""
    config = parse_config(stage2()).rollout_matching
    assert config is not None and config.pipeline is not None
    pipeline = build_pipeline(config.pipeline)
    assert {entry.name for entry in (*pipeline.objective, *pipeline.diagnostics)} == MODULES.keys()
    counts = SupervisionCounts()
    return {
        *RATES,
        *FLAGS,
        *(f"loss/{entry.name}/{term}" for entry in pipeline.objective for term in entry.module.denominators(counts)),
        *(f"{entry.name}/{term}" for entry in pipeline.diagnostics for term in entry.module.denominators(counts)),
        *(f"rollout/dropped/{reason.value}" for reason in DropReason),
        *rollout_dump.COUNTERS,
        *(f"eval_rollout/{name}" for name in detection_metrics({})),
    }


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the log history of one step of each stage, with an evaluation."""
    from coordexp.training.build import run_training

    folder = tmp_path_factory.mktemp("runs")
    model = small_checkpoint(folder / "model")
    names: set[str] = set()
    for stage in (1, 2):
        run = write_run(folder, stage, model, training__eval_strategy="steps", training__eval_steps=1)
        trainer = run_training(load_config(run), Console(quiet=True))
        names |= {name for line in trainer.state.log_history for name in line}
    assert {"loss", "eval_rollout/f1", "rollout/match_rate", "packing/underfilled_rows_total"} <= names
    return names


def test_every_emitted_name_is_documented(emitted: set[str]) -> None:
    assert sorted(emitted - documented()) == []


def test_every_declared_name_is_documented() -> None:
    assert sorted(from_registries() - documented()) == []


def test_no_name_is_documented_that_nothing_emits(emitted: set[str]) -> None:
    assert sorted(documented() - emitted - from_registries()) == []
