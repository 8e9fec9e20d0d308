"""``coordexp data complete``: a model answers a dataset, and what its annotations lack is added as soft objects."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from coordexp import distributed
from coordexp.config import RunConfig, load_config
from coordexp.config.base import default_of
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.data.files import write_atomically
from coordexp.data.jsonl import read_jsonl
from coordexp.data.record_line import write_jsonl
from coordexp.errors import ConfigError
from coordexp.evaluation import read_answers
from coordexp.evaluation.completion import (
    CompletionCounts,
    CompletionRules,
    ModelOrigin,
    complete_records,
    most_likely_missed,
)
from coordexp.evaluation.sheets import draw_contact_sheet
from coordexp.inference.asking import BATCH_SIZE, Asking, asking_config


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture of the most likely missed objects: of how many images, and where."""

    path: Path
    images: int = 12


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """The prompt that was asked (None: the built-in one); on the first rank what was counted, and the files written
    (nothing elsewhere)."""

    counts: CompletionCounts
    prompt: str | None
    files: tuple[Path, ...]


def completion_config(
    model: Path | None, *, config: Path | None, prompt: str | None, batch_size: int | None
) -> RunConfig:
    """What to ask, and how: ``config`` if given; else as the run asked that ``model`` comes from (see
    :func:`~coordexp.inference.asking.asking_config`), by transformers. Always greedy.

    Raises:
        ConfigError: neither a model nor a configuration is named, or one of the files describes no run.
        CheckpointError: no such folder.
    """
    if config is not None:
        values: dict[str, Any] = {} if model is None else {"model.model": str(model)}
        values |= {} if prompt is None else {"template.prompt": prompt}
        run = load_config(config, values)
        if run.rollout_matching is not None:
            values["rollout_matching.decoding.temperature"] = 0.0
            values |= {} if batch_size is None else {"rollout_matching.decode_batch_size": batch_size}
            run = load_config(config, values)
        return run
    if model is None:
        raise ConfigError("name the checkpoint that answers with --model, or a run's YAML with --config")
    asking = Asking(
        batch_size=BATCH_SIZE if batch_size is None else batch_size,
        max_new_tokens=default_of(RolloutMatchingConfig, "max_new_tokens"),
        prompt=prompt,
    )
    return asking_config(model, asking)


def run_completion(
    run: RunConfig,
    console: Console,
    *,
    source: Path,
    out: Path,
    rules: CompletionRules,
    sheet: Sheet | None = None,
) -> CompletionResult:
    """Answer every image of ``source`` with ``run.model``, and write the completed dataset to ``out``.

    Answers lie in ``STEM.answers`` beside it as they come: the same command again goes on where it stopped, and other
    rules need no answers anew. ``STEM.completion.json`` holds what was counted.

    Raises:
        DataError, ConfigError, CheckpointError: as :func:`~coordexp.inference.predict.run_prediction` and
            :func:`~coordexp.evaluation.completion.complete_records`.
    """
    # Torch comes with it, and settings are checked without.
    from coordexp.inference.predict import PredictionOptions, run_prediction

    asked = PredictionOptions(score="confidence")
    run_prediction(run, console, source=source, output=_answers_folder(out), options=asked)
    result = CompletionResult(CompletionCounts(), run.template.prompt, ())
    with distributed.raise_on_all_ranks("coordexp data complete"):
        if distributed.is_main():
            result = _complete_from_answers(run, source, out, rules, sheet)
    return result


def _answers_folder(out: Path) -> Path:
    return out.with_name(f"{out.stem}.answers")


def _complete_from_answers(
    run: RunConfig, source: Path, out: Path, rules: CompletionRules, sheet: Sheet | None
) -> CompletionResult:
    from coordexp.checkpoints.folder import checkpoint_fingerprint
    from coordexp.modeling.load import load_vocab

    model = Path(run.model.model)
    origin = ModelOrigin(str(model), checkpoint_fingerprint(model))
    answers = {answer.sample_id: answer for answer in read_answers(_answers_folder(out))}
    done, counts = complete_records(read_jsonl(source), answers, rules, origin)
    write_jsonl([item.record for item in done], out)
    about = {"source": str(source), **asdict(origin), "prompt": run.template.prompt, "rules": asdict(rules)}
    summary = out.with_name(f"{out.stem}.completion.json")
    text = json.dumps({**about, **counts.to_json()}, indent=2, ensure_ascii=False)
    write_atomically(summary, text + "\n")
    files = [out, summary]
    shown = [] if sheet is None else most_likely_missed(done, sheet.images)
    if sheet is not None and shown:
        files.append(draw_contact_sheet(shown, load_vocab(model), sheet.path))
    return CompletionResult(counts, run.template.prompt, tuple(files))
