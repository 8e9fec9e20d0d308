"""``coordexp evaluate``: how good a model's answers are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console, say, say_written
from coordexp.cli.predict import Classes, ConstantScore, Limit, ModelOption
from coordexp.cli.run import Arguments, Print, print_config
from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.config import RunConfig
    from coordexp.evaluation import ImageAnswer, Summary
    from coordexp.evaluation.renaming import Renaming

Data = Annotated[Path | None, typer.Option(help="JSONL to evaluate on instead of custom.val_jsonl.")]
Output = Annotated[Path | None, typer.Option(help="Folder of figures and answers [<output_dir>/evaluation, or none].")]
Aliases = Annotated[
    Path | None, typer.Option(help="YAML or JSON of the form 'class: [alias, …]', applied to predictions.")
]
Embedder = Annotated[
    Path | None,
    typer.Option(help="Folder of a text encoder: what no alias names becomes the annotated class nearest to it."),
]
EmbeddingThreshold = Annotated[
    float | None, typer.Option(min=-1, max=1, help="Least cosine similarity of --embedder [0.7].")
]
Compared = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A B", help="Compare the saved predictions of two runs on the same images."),
]
SheetOption = Annotated[
    Path | None,
    typer.Option(help="PNG of the images with most mistakes, or with --compare, of the greatest difference."),
]
_THRESHOLD = 0.7
_DRAWN = 12  # images of --sheet
_CONFIG, _SAVED, _RUNS = "a configuration", "saved predictions", "--compare"
_USED_BY = {
    "KEY=VALUE": (_CONFIG,),
    "--print": (_CONFIG,),
    "--model": (_CONFIG,),
    "--data": (_CONFIG,),
    "--classes": (_CONFIG,),
    "--limit": (_CONFIG, _SAVED),
    "--output": (_CONFIG, _SAVED),
    "--segm": (_CONFIG, _SAVED),
    "--resamples": (_RUNS,),
    "--embedding-threshold": ("--embedder",),
}


def evaluate(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml|PREDICTIONS",
            help="A run's configuration: its model answers first. Or a predictions.jsonl, or a folder with one.",
        ),
    ] = None,
    arguments: Arguments = None,
    model: ModelOption = None,
    data: Data = None,
    limit: Limit = None,
    output: Output = None,
    constant_score: ConstantScore = None,
    classes: Classes = None,
    aliases: Aliases = None,
    embedder: Embedder = None,
    embedding_threshold: EmbeddingThreshold = None,
    segm: Annotated[bool, typer.Option("--segm", help="Average precision of masks too.")] = False,
    runs: Compared = None,
    resamples: Annotated[int | None, typer.Option(min=10, help="Resamples of --compare [1000].")] = None,
    sheet: SheetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout instead of tables.")] = False,
    print_only: Print = False,
) -> None:
    """Measure how good answers are: of a checkpoint, of saved predictions, or of two runs against each other."""
    if (source is None) == (runs is None):
        raise ConfigError("name a configuration or predictions to evaluate, or two runs with --compare A B")
    for path in (source, *(runs or ())):
        if path is not None and not path.exists():
            raise DataError("no such file or folder; name a configuration, or saved predictions", path=path)
    console = open_console(stderr=as_json)
    run = None
    if source is not None and source.suffix in (".yaml", ".yml"):
        from coordexp.config import load_config
        from coordexp.config.environment import check_paths

        if print_only:
            print_config(source, arguments or ())
            return
        run = load_config(source, arguments=arguments or ())  # before heavy imports: mistakes show at once
        check_paths(
            {"--model": model} if model is not None else {"model.model": run.model.model},
            {"--data": data} if data is not None else {"custom.val_jsonl": run.custom.val_jsonl},
        )
    kind = _RUNS if runs is not None else _SAVED if run is None else _CONFIG
    given = {
        "--model": model, "--data": data, "--classes": classes, "--limit": limit, "--output": output,
        "--segm": segm or None, "--print": print_only or None, "KEY=VALUE": arguments or None,
        "--resamples": resamples, "--embedding-threshold": None if embedder else embedding_threshold,
    }  # fmt: skip
    for option, value in given.items():  # an option without effect is a misunderstanding
        if value is not None and kind not in _USED_BY[option]:
            raise ConfigError(f"{option} has no use here; it belongs to {' or '.join(_USED_BY[option])}")
    if embedder is not None:
        no_bars_in_log_files()
    from coordexp.evaluation.renaming import Renaming

    rename = Renaming.from_files(aliases, embedder, _THRESHOLD if embedding_threshold is None else embedding_threshold)
    names: Sequence[str] = ()
    if classes is not None:  # evaluating saved answers needs no configuration, which this import brings along
        from coordexp.inference.session import read_classes

        names = read_classes(classes)
    wanted = _Wanted(limit, output, constant_score, rename, segm, sheet, as_json)
    if runs is not None:
        _compare(console, runs, wanted, resamples)
    elif run is not None:
        _evaluate_model(console, run, model, data, wanted, names)
    elif source is not None:
        _evaluate_saved(console, source, wanted)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Options that every way of evaluating takes."""

    limit: int | None
    output: Path | None
    constant_score: float | None
    rename: Renaming
    segm: bool
    sheet: Path | None
    as_json: bool


def _evaluate_model(
    console: Console,
    run: RunConfig,
    model: Path | None,
    data: Path | None,
    wanted: _Wanted,
    classes: Sequence[str],
) -> None:
    from coordexp.inference.prediction import run_evaluation

    no_bars_in_log_files()
    result = run_evaluation(
        run, console, model=model, data=data, limit=wanted.limit, output=wanted.output,
        constant_score=wanted.constant_score, rename=wanted.rename, segm=wanted.segm, classes=classes,
    )  # fmt: skip
    files = [*result.files, *_draw(wanted.sheet, {"prediction": result.answers})] if result.files else []
    if not wanted.as_json:
        _show(console, result.summary, f"{model or run.model.model} on {result.data}", files)
    elif not console.quiet:
        typer.echo(result.metrics_json.read_text(encoding="utf-8"), nl=False)


def _evaluate_saved(console: Console, source: Path, wanted: _Wanted) -> None:
    from coordexp.evaluation import EvaluationOptions, read_answers, summarise
    from coordexp.evaluation.summary import write_summary

    saved = read_answers(source)[: wanted.limit]
    answers = wanted.rename(saved)
    options = EvaluationOptions(segm=wanted.segm, constant_score=wanted.constant_score)
    summary = summarise(answers, options, wanted.rename.note(saved, answers))
    about = {"predictions": str(source), **wanted.rename.about}
    files = [] if wanted.output is None else write_summary(wanted.output, summary, answers, about, options)
    files += _draw(wanted.sheet, {"prediction": answers})
    if not wanted.as_json:
        _show(console, summary, str(source), files)
        return
    fields = {name: value for name, value in asdict(summary).items() if name != "figures"}
    typer.echo(json.dumps({**about, "metrics": summary.figures, **fields}, ensure_ascii=False))


def _show(console: Console, summary: Summary, title: str, files: Sequence[Path]) -> None:
    from coordexp.evaluation.summary import summary_tables

    for table in summary_tables(summary, title):
        console.print(table)
    for note in summary.notes:
        say(console, f"note: {note}")
    counts = {name: int(summary.figures[name]) for name in ("images", "gt_objects", "pred_objects", "matched_objects")}
    say(
        console,
        f"{counts['images']} images with {counts['gt_objects']} objects; {counts['pred_objects']} predicted, "
        f"{counts['matched_objects']} of them right",
    )
    say_written(console, files)


def _compare(console: Console, runs: tuple[Path, Path], wanted: _Wanted, resamples: int | None) -> None:
    from coordexp.evaluation import read_answers
    from coordexp.evaluation.compare import RESAMPLES, compare, comparison_json, comparison_tables, paired

    names = str(runs[0]), str(runs[1])
    saved = [read_answers(run) for run in runs]
    a, b = (wanted.rename(run) for run in saved)
    drawn = RESAMPLES if resamples is None else resamples
    comparison = compare(a, b, resamples=drawn, constant_score=wanted.constant_score)
    notes = [note for run, answers in zip(saved, (a, b), strict=True) for note in wanted.rename.note(run, answers)]
    files = _draw(wanted.sheet, {"a": a, "b": paired(a, b)})
    if wanted.as_json:
        typer.echo(json.dumps({**comparison_json(comparison, names), **wanted.rename.about, "notes": notes}))
        return
    for table in comparison_tables(comparison, names):
        console.print(table)
    for label, note in zip("ab", notes, strict=False):
        say(console, f"note: {label}: {note}")
    say_written(console, files)


def _draw(sheet: Path | None, runs: Mapping[str, Sequence[ImageAnswer]]) -> list[Path]:
    if sheet is None:
        return []
    from coordexp.evaluation.drawing import draw_comparison, most_informative_images

    chosen = most_informative_images(list(runs.values()), _DRAWN)
    if not chosen:
        raise DataError("no mistake and no difference to draw; leave out --sheet", path=sheet)
    across = 3 if len(runs) == 1 else 2
    drawn = {name: [run[n] for n in chosen] for name, run in runs.items()}
    draw_comparison(drawn, sheet, -(-_DRAWN // across), across)
    return [sheet]
