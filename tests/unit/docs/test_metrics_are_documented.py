"""The table of metrics contains every name that a run emits, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rich.console import Console

from coordexp.config import load_config, parse_config
from coordexp.config.rollout import EvalDetectionConfig
from coordexp.evaluation.summary import summarise
from coordexp.metrics.reduce import RATES
from coordexp.metrics.table import all_metrics, find_metric
from coordexp.objective import MODULES, build_pipeline
from coordexp.recording import writer
from coordexp.records import DropReason
from support.cli_runs import small_checkpoint, write_run
from support.config_samples import stage2
from support.scored_answers import random_answers

ROOT = Path(__file__).parents[3]
A_METRIC = re.compile(r"(rollout|packing|time|memory|train|coord_diag|stage2|safeguard)(/[a-z0-9_]+)+")


def written_in_the_code() -> set[str]:
    """Literal names of metrics in the package's source, but for the table itself."""
    texts: set[str] = set()
    for path in (ROOT / "src" / "coordexp").rglob("*.py"):
        if path.name != "table.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if A_METRIC.fullmatch(text)}


def put_together_by_the_code() -> set[str]:
    """Names that the code composes, whether or not a short run emits them."""
    config = parse_config(stage2()).rollout_matching
    assert config is not None and config.pipeline is not None
    pipeline = build_pipeline(config.pipeline)
    declared = {entry.name for entry in (*pipeline.objective, *pipeline.diagnostics)}
    assert declared == MODULES.keys(), "declare every module in tests/support/config_samples.py"
    everything = EvalDetectionConfig(f1ish_iou_thrs=(0.5, 0.75), use_segm=True).scored(None)
    terms = [("loss", f"{one.name}/{term}") for one in pipeline.objective for term in one.module.means_over]
    terms += [(one.name, term) for one in pipeline.diagnostics for term in one.module.means_over]
    return {
        *RATES,
        *(f"{family}/{channel}{term}" for family, term in terms for channel in ("", "A/", "B/")),
        *(f"rollout/dropped/{reason.value}" for reason in DropReason),
        *writer.COUNTERS,
        *(f"eval_rollout/{name}" for name in summarise(random_answers(30, 1), everything).figures),
    }


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    from coordexp.training.run import run_training

    folder = tmp_path_factory.mktemp("runs")
    model = small_checkpoint(folder / "model")
    names: set[str] = set()
    for stage in (1, 2):
        often = {"training__eval_strategy": "steps", "training__eval_steps": 1, "training__eval_on_start": True}
        run = write_run(folder, stage, model, **often)
        trainer = run_training(load_config(run), Console(quiet=True))
        names |= {name for line in trainer.state.log_history for name in line}
    assert {"loss", "eval_rollout/f1", "rollout/match_rate", "packing/underfilled_rows_total"} <= names
    return names


def test_every_emitted_name_is_in_the_table(emitted: set[str]) -> None:
    assert sorted(name for name in emitted if find_metric(name) is None) == []


def test_every_name_in_the_code_is_in_the_table() -> None:
    names = written_in_the_code() | put_together_by_the_code()
    assert len(names) > 60
    assert sorted(name for name in names if find_metric(name) is None) == []


def test_every_name_in_the_table_is_emitted(emitted: set[str]) -> None:
    used = {find_metric(name) for name in emitted | written_in_the_code() | put_together_by_the_code()}
    assert sorted(metric.name for metric in all_metrics() if metric not in used) == []
