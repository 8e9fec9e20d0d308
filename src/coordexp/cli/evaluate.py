"""``coordexp predict``, ``evaluate``: what a model answers, and how good that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console
from coordexp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.config import RunConfig
    from coordexp.evaluation import ImageAnswer

    Rename = Callable[[Sequence[ImageAnswer]], list[ImageAnswer]]

ModelOption = Annotated[Path | None, typer.Option(help="Checkpoint to use instead of model.model.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")]
ConstantScore = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Score of every prediction, instead of its tokens' probability."),
]


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(predict)
    app.command()(evaluate)


def predict(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")],
    source: Annotated[Path, typer.Argument(metavar="DATA.jsonl|FOLDER", help="A dataset, or a folder of images.")],
    output: Annotated[Path, typer.Option(help="Folder of predictions.jsonl and COCO's results.")],
    model: ModelOption = None,
    limit: Limit = None,
    constant_score: ConstantScore = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON on stdout.")] = False,
) -> None:
    """Let a checkpoint answer for every image of a dataset or a folder, with a score for every object.

    Answers are written as they come. The same command again goes on where it stopped.
    """
    from coordexp.config import load_config

    run = load_config(config)
    from coordexp.training.predict import run_prediction

    console = open_console(stderr=as_json)
    no_bars_in_log_files()
    result = run_prediction(
        run, console, source=source, output=output, model=model, limit=limit, constant_score=constant_score
    )
    if as_json:
        if not console.quiet:
            fields = {"images": result.images, "resumed": result.resumed, "files": [str(path) for path in result.files]}
            typer.echo(json.dumps(fields))
        return
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    _say(console, f"{result.images} images answered{resumed}")
    _say(console, f"wrote {', '.join(str(path) for path in result.files)}")


def evaluate(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml|PREDICTIONS",
            help="A run's configuration: its model answers first. Or a predictions.jsonl, or a folder that holds one.",
        ),
    ] = None,
    model: ModelOption = None,
    data: Annotated[Path | None, typer.Option(help="JSONL to evaluate on instead of custom.val_jsonl.")] = None,
    limit: Limit = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of figures and answers [<output_dir>/evaluation, or none].")
    ] = None,
    constant_score: ConstantScore = None,
    aliases: Annotated[
        Path | None, typer.Option(help="YAML or JSON of the form 'class: [alias, …]', applied to predictions.")
    ] = None,
    embedder: Annotated[
        Path | None,
        typer.Option(help="Folder of a text encoder: what no alias names becomes the annotated class nearest to it."),
    ] = None,
    embedding_threshold: Annotated[
        float, typer.Option(min=-1, max=1, help="Least cosine similarity of --embedder.")
    ] = 0.7,
    segm: Annotated[bool, typer.Option(help="Average precision of masks too (of saved predictions).")] = False,
    runs: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Compare the saved predictions of two runs on the same images."),
    ] = None,
    resamples: Annotated[int, typer.Option(min=10, help="Resamples of --compare.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout instead of tables.")] = False,
) -> None:
    """Measure how good answers are: of a checkpoint, of saved predictions, or of two runs against each other."""
    if (source is None) == (runs is None):
        raise ConfigError("name a configuration or predictions to evaluate, or two runs with --compare A B")
    console = open_console(stderr=as_json)
    run = None
    if source is not None and source.suffix in (".yaml", ".yml"):
        from coordexp.config import load_config

        run = load_config(source)  # before anything heavy is imported: a mistake in the YAML shows at once
    rename = _renaming(aliases, embedder, embedding_threshold)
    if runs is not None:
        _compare(console, runs, rename, constant_score, resamples, as_json)
    elif run is not None:
        _evaluate_model(console, run, model, data, limit, output, constant_score, rename, as_json)
    elif source is not None:
        _evaluate_saved(console, source, limit, output, constant_score, rename, segm, as_json)


def _evaluate_model(
    console: Console,
    run: RunConfig,
    model: Path | None,
    data: Path | None,
    limit: int | None,
    output: Path | None,
    constant_score: float | None,
    rename: Rename | None,
    as_json: bool,
) -> None:
    from coordexp.evaluation.tables import summary_tables
    from coordexp.training.evaluate import run_evaluation

    no_bars_in_log_files()
    result = run_evaluation(
        run, console, model=model, data=data, limit=limit, output=output, constant_score=constant_score,
        rename=rename,
    )  # fmt: skip
    if as_json:
        if not console.quiet:
            typer.echo(result.metrics_json.read_text(encoding="utf-8"), nl=False)
        return
    for table in summary_tables(result.summary, f"{model or run.model.model} on {result.data}"):
        console.print(table)
    for note in result.summary.notes:
        _say(console, f"note: {note}")
    found = {name: int(result.summary.figures[name]) for name in ("images", "gt_objects", "pred_objects")}
    _say(
        console,
        f"{found['images']} images with {found['gt_objects']} objects; {found['pred_objects']} predicted, "
        f"{int(result.summary.figures['matched_objects'])} of them right",
    )
    _say(console, f"wrote {', '.join(str(path) for path in result.files)}")


def _evaluate_saved(
    console: Console,
    source: Path,
    limit: int | None,
    output: Path | None,
    constant_score: float | None,
    rename: Rename | None,
    segm: bool,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from coordexp.evaluation import EvaluationOptions, summarise
    from coordexp.evaluation.summary import write_summary
    from coordexp.evaluation.tables import summary_tables

    answers = _read(source, rename)[:limit]
    options = EvaluationOptions(segm=segm, constant_score=constant_score)
    summary = summarise(answers, options)
    files = [] if output is None else write_summary(output, summary, answers, {"predictions": str(source)}, options)
    if as_json:
        fields = {name: value for name, value in asdict(summary).items() if name != "figures"}
        typer.echo(json.dumps({"metrics": summary.figures, **fields}, ensure_ascii=False))
        return
    for table in summary_tables(summary, str(source)):
        console.print(table)
    for note in summary.notes:
        _say(console, f"note: {note}")
    if files:
        _say(console, f"wrote {', '.join(str(path) for path in files)}")


def _compare(
    console: Console,
    runs: tuple[Path, Path],
    rename: Rename | None,
    constant_score: float | None,
    resamples: int,
    as_json: bool,
) -> None:
    from coordexp.evaluation.compare import compare
    from coordexp.evaluation.tables import differences_json, differences_table

    confidence = 0.95
    names = str(runs[0]), str(runs[1])
    found = compare(
        _read(runs[0], rename), _read(runs[1], rename), resamples=resamples, confidence=confidence,
        constant_score=constant_score,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(differences_json(found, names, confidence)))
    else:
        console.print(differences_table(found, names, confidence))


def _renaming(aliases: Path | None, embedder: Path | None, threshold: float) -> Rename | None:
    """Aliases first; then the encoder, for what is still annotated nowhere. Files are read before any work is done."""
    from coordexp.evaluation.categories import apply_aliases, read_aliases

    steps: list[Rename] = []
    if aliases is not None:
        class_of = read_aliases(aliases)
        steps.append(lambda answers: apply_aliases(answers, class_of))
    if embedder is not None:
        from coordexp.evaluation.embedding import TextEncoder, apply_embedding

        encoder = TextEncoder(embedder)
        steps.append(lambda answers: apply_embedding(answers, encoder, threshold))
    return (lambda answers: reduce(lambda found, step: step(found), steps, list(answers))) if steps else None


def _read(source: Path, rename: Rename | None) -> list[ImageAnswer]:
    from coordexp.evaluation import read_answers

    answers = read_answers(source)
    return rename(answers) if rename else answers


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
