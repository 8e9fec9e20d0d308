"""``coordexp evaluate``: how good a model's answers are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import (
    check_checkpoint,
    checked_inputs,
    echo,
    no_bars_in_log_files,
    on_interrupt,
    open_console,
    picture,
    refuse_idle,
    say,
    say_written,
    with_options,
)
from coordexp.cli.predict import Answers, Classes, ConstantScore, Limit, ModelOption
from coordexp.cli.tiling import TileOverlap, Tiles
from coordexp.cli.train import Print, is_config, print_config, split_words
from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.evaluation.answers import ImageAnswer
    from coordexp.evaluation.renaming import Renaming
    from coordexp.evaluation.summary import Summary

_THRESHOLD = 0.7
_DRAWN = 12  # images of --sheet
_CONFIG, _SAVED, _RUNS = "a configuration", "saved predictions", "--compare"
_USED_BY = {
    "model": (_CONFIG,),
    "data": (_CONFIG,),
    "classes": (_CONFIG,),
    "limit": (_CONFIG, _SAVED),
    "out": (_CONFIG, _SAVED),
    "overwrite": (_CONFIG, _SAVED),
    "segm": (_CONFIG, _SAVED),
    "calibrate": (_CONFIG,),
    "answers": (_CONFIG,),
    "tiles": (_CONFIG,),
    "overlap": (_CONFIG,),
    "print": (_CONFIG,),
    "resamples": (_RUNS,),
}


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of ``coordexp evaluate``."""

    model: ModelOption = None
    data: Annotated[Path | None, typer.Option(help="JSONL to evaluate on, all of it, instead of custom.val_jsonl.")] = (
        None
    )
    limit: Limit = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of figures and answers [<output_dir>/evaluation, in a folder of its own if --model "
            "is not the run's; none for saved predictions]."
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an evaluation of another model, dataset or settings in --out.")
    ] = False
    constant_score: ConstantScore = None
    classes: Classes = None
    aliases: Annotated[
        Path | None, typer.Option(help="YAML or JSON of the form 'class: [alias, …]', applied to predictions.")
    ] = None
    embedder: Annotated[
        Path | None,
        typer.Option(help="Folder of a text encoder: predictions without an alias get the nearest annotated class."),
    ] = None
    embedding_threshold: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Least cosine similarity of --embedder [0.7].")
    ] = None
    answers: Answers = 1
    tiles: Tiles = None
    overlap: TileOverlap = None
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Fit confidences to what is right here; stored in the checkpoint's folder."),
    ] = False
    segm: Annotated[bool, typer.Option("--segm", help="Average precision of masks too.")] = False
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Compare the saved predictions of two runs on the same images."),
    ] = None
    resamples: Annotated[int | None, typer.Option(min=10, max=1_000_000, help="Resamples of --compare [1000].")] = None
    sheet: Annotated[
        Path | None,
        typer.Option(
            callback=picture, help="Picture of the images with most mistakes or, with --compare, greatest difference."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout instead of tables.")] = False
    print: Print = False


@with_options
def evaluate(
    options: EvaluationOptions,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml|PREDICTIONS] [KEY=VALUE]...",
            help="A run's configuration, with keys to set on top: its model answers first. Or a predictions.jsonl, or "
            "a folder with one. Or neither, with --model, which answers by its own settings.",
        ),
    ] = None,
) -> None:
    """Measure a model or saved predictions, or compare two runs."""
    names, arguments = split_words(words)
    source = Path(names[0]) if names else None
    if len(names) > 1:
        raise ConfigError(f"{names[1]}: one configuration or file of predictions at a time; two runs: --compare A B")
    if sum((source is not None, options.compare is not None, source is None and options.model is not None)) != 1:
        raise ConfigError(
            "name what to evaluate: a checkpoint with --model and --data, a configuration, predictions, or two runs "
            "with --compare A B"
        )
    for path in (source, *(options.compare or ())):
        if path is not None and not path.exists():
            raise DataError("no such file or folder; name a configuration, or saved predictions", path=path)
    is_saved = source is not None and not is_config(source.name)
    _check_options(options, _RUNS if options.compare is not None else _SAVED if is_saved else _CONFIG, arguments)
    if options.compare is not None:
        _compare(options.compare, options, _renaming(options))
    elif source is not None and is_saved:
        _evaluate_saved(source, options, _renaming(options))
    elif options.print:
        _print_run(source, options, arguments)
    else:
        _evaluate_model(source, options, arguments)


def _check_options(options: EvaluationOptions, kind: str, arguments: Sequence[str]) -> None:
    # An option without effect is a misunderstanding.
    unused = [
        f"--{name}"
        for name, users in _USED_BY.items()
        if getattr(options, name) != getattr(EvaluationOptions, name) and kind not in users
    ]
    if unused or (arguments and kind != _CONFIG):
        users = _USED_BY[unused[0][2:]] if unused else (_CONFIG,)
        refuse_idle([*unused, "KEY=VALUE"][0], True, f"belongs to {' or '.join(users)}")
    if options.data is not None and any(word.startswith("custom.val_jsonl=") for word in arguments):
        raise ConfigError("--data and custom.val_jsonl both name the dataset to evaluate on; give one of them")
    if options.calibrate:
        from coordexp.checkpoints.card import check_calibrates

        check_calibrates(options.answers, options.tiles, options.constant_score)
    idle = options.embedder is None and options.embedding_threshold is not None
    refuse_idle("--embedding-threshold", idle, "belongs to --embedder")


def _renaming(options: EvaluationOptions) -> Renaming:
    from coordexp.evaluation.renaming import Renaming

    if options.embedder is not None:
        no_bars_in_log_files()
    threshold = _THRESHOLD if options.embedding_threshold is None else options.embedding_threshold
    return Renaming.from_files(options.aliases, options.embedder, threshold)


def _print_run(source: Path | None, options: EvaluationOptions, arguments: Sequence[str]) -> None:
    from coordexp.api import evaluated_run
    from coordexp.config.from_yaml import resolved_yaml
    from coordexp.config.resolved import in_place_of_validation

    if source is None:
        echo(resolved_yaml(evaluated_run(None, options.model, options.data, arguments, "--")[0]), nl=False)
    else:
        print_config(source, arguments, overrides=in_place_of_validation(options.data))


def _evaluate_model(source: Path | None, options: EvaluationOptions, arguments: Sequence[str]) -> None:
    from coordexp.api import evaluated_run

    # Mistakes show at once: in the YAML before numpy is imported, others before torch.
    run, model = evaluated_run(source, options.model, options.data, arguments, "--")
    from coordexp import distributed
    from coordexp.checkpoints.fetch import with_model_here
    from coordexp.config import RunConfig
    from coordexp.config.resolved import AnswerConfig
    from coordexp.data.tiles import Tiling
    from coordexp.inference.session import read_class_names, with_several_answers

    rename, tiling = _renaming(options), Tiling.asked(options.tiles, options.overlap)
    if model is not None:
        model = check_checkpoint(model)
    elif isinstance(run, RunConfig):
        run = with_model_here(run)
    classes = read_class_names(options.classes, model or run.model.model)
    with_several_answers(AnswerConfig.of_run(run), options.answers, arguments)
    if distributed.world_size() == 1:
        limit = run.custom.val_sample_limit if options.limit is None else options.limit
        checked_inputs(model or run.model.model, [(options.data or run.custom.val_jsonl, limit)])
    from coordexp.inference.asking import Asking
    from coordexp.inference.evaluation import run_evaluation

    console = open_console(stderr=options.as_json)
    no_bars_in_log_files()
    with on_interrupt("the evaluation is not finished; the same command starts it again"):
        result = run_evaluation(
            run, console, model=model, data=options.data, limit=options.limit, output=options.out,
            constant_score=options.constant_score, rename=rename, segm=options.segm,
            calibrate=options.calibrate, overwrite=options.overwrite,
            asking=Asking(classes, options.answers, tiling),
        )  # fmt: skip
    if not options.as_json:
        title = f"{model or run.model.model} on {result.data}"
        _show(console, result.summary, title, result.files, result.by_answers)
    elif not console.quiet:
        echo(result.metrics_json.read_text(encoding="utf-8"), nl=False)
    if result.files:
        _draw(console, options.sheet, {"prediction": result.answers})


def _evaluate_saved(source: Path, options: EvaluationOptions, rename: Renaming) -> None:
    from coordexp.config.rollout import EvalDetectionConfig
    from coordexp.evaluation.answers import class_list_of, read_answers
    from coordexp.evaluation.summary import check_replaced, summarise, write_summary

    console = open_console(stderr=options.as_json)
    score = None if options.constant_score is None else "constant"
    about = {"predictions": str(source), "limit": options.limit, "score": score, **rename.about}
    if options.out is not None:
        check_replaced(options.out, about, options.overwrite)
    saved = read_answers(source)[: options.limit]
    answers = rename(saved)
    figures = EvalDetectionConfig(use_segm=options.segm).scored(options.constant_score)
    summary = summarise(answers, figures, rename.note(saved, answers), with_confidences=True)
    files = []
    if options.out is not None:
        files = write_summary(options.out, summary, answers, about, figures, class_list_of(source))
    if not options.as_json:
        _show(console, summary, str(source), files)
    else:
        fields = {name: value for name, value in asdict(summary).items() if name != "figures"}
        echo(json.dumps({**about, "metrics": summary.figures, **fields}, ensure_ascii=False))
    _draw(console, options.sheet, {"prediction": answers})


def _show(
    console: Console,
    summary: Summary,
    title: str,
    files: Sequence[Path],
    by_answers: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    from coordexp.evaluation.several_answers import answers_table
    from coordexp.evaluation.summary import summary_tables

    for table in summary_tables(summary, title):
        console.print(table)
    if by_answers:
        console.print(answers_table(by_answers))
    for note in summary.notes:
        say(console, f"note: {note}")
    counts = {name: int(summary.figures[name]) for name in ("images", "gt_objects", "pred_objects", "matched_objects")}
    say(
        console,
        f"{counts['images']} images with {counts['gt_objects']} objects; {counts['pred_objects']} predicted, "
        f"{counts['matched_objects']} of them right",
    )
    say_written(console, files)


def _compare(runs: tuple[Path, Path], options: EvaluationOptions, rename: Renaming) -> None:
    from coordexp.evaluation.answers import read_answers
    from coordexp.evaluation.coco_results import with_constant_score
    from coordexp.evaluation.compare import RESAMPLES, compare, comparison_json, comparison_tables, paired

    console = open_console(stderr=options.as_json)
    names = str(runs[0]), str(runs[1])
    saved = [read_answers(run) for run in runs]
    a, b = (rename(run) for run in saved)
    ranked = (with_constant_score(run, options.constant_score) for run in (a, b))
    comparison = compare(*ranked, resamples=options.resamples or RESAMPLES)
    notes = [note for run, answers in zip(saved, (a, b), strict=True) for note in rename.note(run, answers)]
    if options.as_json:
        echo(json.dumps({**comparison_json(comparison, names), **rename.about, "notes": notes}))
    else:
        for table in comparison_tables(comparison, names):
            console.print(table)
        for label, note in zip("ab", notes, strict=False):
            say(console, f"note: {label}: {note}")
    _draw(console, options.sheet, {"a": a, "b": paired(a, b)})


def _draw(console: Console, sheet: Path | None, runs: Mapping[str, Sequence[ImageAnswer]]) -> None:
    # Last: a photograph that is gone must not cost the figures.
    if sheet is None:
        return
    from coordexp.evaluation.drawing import draw_comparison, most_informative_images

    chosen = most_informative_images(list(runs.values()), _DRAWN)
    if not chosen:
        say(console, f"note: {sheet} is not written: no image has a mistake or a difference")
        return
    across = 3 if len(runs) == 1 else 2
    drawn = {name: [run[n] for n in chosen] for name, run in runs.items()}
    draw_comparison(drawn, sheet, -(-_DRAWN // across), across)
    say_written(console, [sheet])
