"""``coordexp.train``, ``evaluate``, ``convert``, ``tile`` and ``complete``: these commands from Python.
Everything heavy is imported by the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from pydantic_core import to_jsonable_python

from coordexp.config import load_config
from coordexp.config.checks import check_paths
from coordexp.config.resolved import AnswerConfig, EvaluationConfig, in_place_of_validation
from coordexp.config.schema import RunConfig
from coordexp.config.source import checked_overrides, dump_value
from coordexp.errors import ConfigError, DataError, whole_number
from coordexp.heavy_imports import heavy_imports

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainerCallback

    from coordexp.data.convert import ConversionReport
    from coordexp.data.tiles import TileCounts
    from coordexp.inference.completion import CompletionCounts, CompletionRules
    from coordexp.inference.evaluation import EvaluationResult


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run.

    ``checkpoint``: the folder of its model, ready for ``Detector``. ``metrics``: the last value of everything that was
    logged, by name. ``history``: every log line in order, with its ``step`` and ``epoch``. ``config``: as it was run.
    """

    checkpoint: Path
    metrics: dict[str, float]
    history: tuple[dict[str, float], ...]
    config: RunConfig

    def __repr__(self) -> str:
        return f"<Run {self.checkpoint}: {len(self.history)} log lines, {len(self.metrics)} metrics>"


def train(
    config: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    quiet: bool = False,
) -> Run:
    """Train as ``coordexp train`` does.

    Args:
        config: the run's YAML.
        overrides: keys on top of it, e.g. ``{"training.max_steps": 100}``.
        callbacks: of transformers' ``TrainerCallback``; they see each step, log line, evaluation and save.
        quiet: without a progress bar.

    Raises:
        CoordExpError: as the command; RunStopped if a signal ended the run, with everything saved.
    """
    run = load_config(config, overrides)
    check_paths({"model.model": run.model.model}, run.custom.data_paths)
    from coordexp.checkpoints.card import with_own_template
    from coordexp.checkpoints.fetch import with_model_here

    run = with_own_template(with_model_here(run))
    with heavy_imports():
        from coordexp.modeling.load import no_progress_bars
        from coordexp.training.run import run_training

    given = tuple(f"{key}={dump_value(to_jsonable_python(value))}" for key, value in (overrides or {}).items())
    with no_progress_bars():
        trainer = run_training(
            run, _console(quiet), run.custom.trainer_variant or "stage 1", Path(config), given, callbacks=callbacks
        )
    history = tuple(dict(line) for line in trainer.state.log_history)
    last = {name: value for line in history for name, value in line.items() if name not in ("step", "epoch")}
    return Run(Path(run.training.output_dir), last, history, run)


def evaluate(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    classes: Sequence[str] = (),
    calibrate: bool = False,
    quiet: bool = False,
    answers: int = 1,
    tiles: int | tuple[int, int] | None = None,
    overlap: float | None = None,
    overwrite: bool = False,
) -> EvaluationResult:
    """Evaluate a checkpoint as ``coordexp evaluate`` does, and write figures and answers.

    Args:
        config: a run's YAML; None takes the settings of ``model``'s own run.
        overrides: keys on top of the YAML.
        model: a checkpoint, instead of ``model.model``.
        data: a JSONL, instead of ``custom.val_jsonl``; all of it, whatever the YAML's ``custom.val_sample_limit``.
        limit: use only the first images.
        out: folder of figures and answers. None: ``<output_dir>/evaluation``, or ``evaluation/NAME`` in it
            for a ``model`` that the run did not write.
        classes: the only names that answers may contain; empty for any.
        calibrate: fit confidences to what is right here, and store that in the checkpoint's folder.
        quiet: without a progress bar.
        answers: per image, merged into one; ``by_answers`` then has figures of one, merged and best answers.
        tiles: answer tiles of this side, or (width, height), in pixels, and merge their answers.
        overlap: share of its side that a tile has at least from its neighbour; None: 0.2.
        overwrite: replace an evaluation of another model, dataset or settings in ``out``.

    Returns:
        ``metrics`` by name, ``answers``, and ``summary`` with figures by class and thresholds.

    Raises:
        CoordExpError: as the command.
    """
    from coordexp.checkpoints.fetch import model_folder, with_model_here
    from coordexp.inference.session import checked_class_names, with_several_answers

    answers, limit = whole_number("answers", answers), None if limit is None else whole_number("limit", limit)
    path, checkpoint, jsonl = (None if given is None else Path(given) for given in (config, model, data))
    if config is None and overrides:
        raise ConfigError("overrides belong to a configuration; name one")
    run, checkpoint = evaluated_run(path, checkpoint, jsonl, overrides=overrides)
    if checkpoint is not None:
        checkpoint = model_folder(checkpoint)
    elif isinstance(run, RunConfig):
        run = with_model_here(run)
    with heavy_imports():
        from coordexp.data.tiles import Tiling
        from coordexp.inference.asking import Asking
        from coordexp.inference.evaluation import run_evaluation
        from coordexp.modeling.load import no_progress_bars

    names = checked_class_names(classes, checkpoint or run.model.model)
    with_several_answers(AnswerConfig.of_run(run), answers, _arguments(overrides))
    with no_progress_bars():
        return run_evaluation(
            run, _console(quiet), model=checkpoint, data=jsonl, limit=limit, output=None if out is None else Path(out),
            calibrate=calibrate, overwrite=overwrite, asking=Asking(names, answers, Tiling.asked(tiles, overlap)),
        )  # fmt: skip


def evaluated_run(
    config: Path | None,
    model: Path | None,
    data: Path | None,
    arguments: Sequence[str] = (),
    prefix: str = "",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[RunConfig | EvaluationConfig, Path | None]:
    """The run to evaluate, of a YAML, or of the card of ``model``, which is then fetched if it is of the hub; and the
    checkpoint in place of the run's own. ``overrides`` are values on top of the YAML, ``arguments`` words. Raises
    ConfigError if something is not there; ``prefix``: of ``model`` and ``data`` in its text."""
    models = {} if model is None else {f"{prefix}model": model}
    if config is not None:
        run = load_config(config, in_place_of_validation(data) | checked_overrides(overrides), arguments)
        models = models or {"model.model": run.model.model}
    elif model is not None:
        check_paths(models, {f"{prefix}data": data})
        from coordexp.checkpoints.fetch import model_folder
        from coordexp.inference.session import evaluation_config

        model = model_folder(model)
        run = evaluation_config(model, data, arguments)
    else:
        raise ConfigError("name a configuration or model= to evaluate")
    check_paths(models, {"custom.val_jsonl" if data is None else f"{prefix}data": data or run.custom.val_jsonl})
    return run, model


def convert(form: str, source: str | Path, out: str | Path, **options: Any) -> ConversionReport:
    """Convert annotations to JSONL as ``coordexp data convert`` does.

    Args:
        form: a format's name, e.g. ``"coco"``, ``"voc"``, ``"yolo"``, ``"labelme"``, ``"csv"``, ``"lvis"``.
        source: the file or folder that the command names first.
        out: folder of the JSONL and its images.
        options: those of the command, e.g. ``split="train"``, ``max_pixels=128 * 128``; folders end in ``_dir``
            (``images_dir="photos"`` for ``--images``), and ``resize=False`` is ``--no-resize``.

    Returns:
        The report: ``jsonl``, ``images``, ``objects``, ``objects_by_desc``, and everything left out, by reason.

    Raises:
        ConfigError: an unknown format or option. DataError: as the command.
    """
    from coordexp.data import convert as formats

    known = {name.removeprefix("convert_"): getattr(formats, name) for name in formats.__all__ if "convert_" in name}
    fixed = {"lvis": True} if form == "lvis" else {}
    converter = known.get("coco" if form == "lvis" else form)
    if converter is None:
        raise ConfigError(f"convert: {form!r} is unknown; expected one of {', '.join(sorted([*known, 'lvis']))}")
    of_images = {field.name for field in fields(formats.ImageOptions)}
    parameters = inspect.signature(converter).parameters
    first, *others = (name for name in parameters if name not in ("out_dir", "options"))
    if unknown := options.keys() - of_images - set(others):
        raise ConfigError(
            f"convert: {form} has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted({*others, *of_images} - {'progress'}))}"
        )
    if "images_dir" in others and parameters["images_dir"].default is inspect.Parameter.empty:
        options.setdefault("images_dir", None)
    image_options = formats.ImageOptions(**{name: value for name, value in options.items() if name in of_images})
    own = {name: value for name, value in options.items() if name not in of_images}
    return converter(**{first: source, "out_dir": out}, **own, **fixed, options=image_options)


def tile(
    data: str | Path,
    out: str | Path,
    size: str | SupportsIndex | Sequence[SupportsIndex],
    *,
    overlap: float = 0.2,
    min_area_ratio: float = 0.1,
    negatives: float = 1.0,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TileCounts:
    """Cut photographs into tiles as ``coordexp data tile`` does.

    Args:
        data: the JSONL of the photographs.
        out: the JSONL of the tiles; their images are in ``images/STEM`` next to it.
        size: side of a tile, or (width, height), in pixels.
        overlap: share of its side that a tile has at least from its neighbour.
        min_area_ratio: least share of its area that a cut object must have in a tile.
        negatives: share of the tiles without objects that is kept, drawn with ``seed``.
        overwrite: replace ``out``, if it is there.
        progress: called with (photographs done, all).

    Returns:
        Counts of photographs, tiles, and objects that are whole, cut and lost.

    Raises:
        ConfigError: a number outside of its range, no such dataset. DataError: ``out`` exists, or is ``data``; a
            photograph cannot be read.
    """
    from coordexp.data.files import check_new_file, is_same_file
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.tiles import Tiling, write_tiles

    source, tiles = Path(data), Path(out)
    tiling = Tiling.of(size, overlap)
    check_paths({}, {"data": source})
    if is_same_file(tiles, source):
        raise DataError("is the dataset of the photographs, which tiles refer to; name another file", path=tiles)
    check_new_file(tiles, overwrite)
    return write_tiles(
        read_jsonl(source), tiles, tiling, min_area_ratio=min_area_ratio, negatives=negatives, seed=seed,
        progress=progress,
    )  # fmt: skip


def complete(
    data: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    batch_size: int | None = None,
    rules: CompletionRules | None = None,
    tiles: int | tuple[int, int] | None = None,
    overlap: float | None = None,
    sheet: str | Path | None = None,
    sheet_images: int = 12,
    overwrite: bool = False,
    quiet: bool = False,
) -> CompletionCounts | None:
    """Add what a model finds and the annotations lack, as ``coordexp data complete`` does.

    Args:
        data: the JSONL to complete.
        out: the new JSONL. Answers are kept next to it: the same call continues where it stopped.
        model: the checkpoint that answers; None takes ``model.model`` of ``config``.
        config: a run's YAML, for prompt, decoding and backend; None takes those of ``model``'s own run.
        overrides: keys on top of it.
        prompt: instead of the prompt of ``config``, or if ``model``'s run has none.
        batch_size: images answered at once; None takes that of ``config``, or 8.
        rules: when an object is added, and with which weight; None takes the command's defaults.
        tiles: answer tiles of this side, or (width, height), in pixels, and merge their answers.
        overlap: share of its side that a tile has at least from its neighbour; None: 0.2.
        sheet: a picture of the ``sheet_images`` images with the likeliest missed objects.
        overwrite: replace ``out``, if it is there.
        quiet: without a progress bar.

    Returns:
        Counts, ``outcomes`` of all predicted objects among them; None on ranks other than the first.

    Raises:
        CoordExpError: as the command.
    """
    from coordexp.checkpoints.fetch import model_folder
    from coordexp.data.tiles import Tiling
    from coordexp.inference.completion import CompletionRules, check_files, completion_config, run_completion

    source, completed, picture = Path(data), Path(out), None if sheet is None else Path(sheet)
    check_paths({} if model is None else {"model": model}, {"data": source})
    check_files(source, completed, picture, whole_number("sheet_images", sheet_images), overwrite)
    if rules is not None and not isinstance(rules, CompletionRules):
        raise ConfigError(f"rules: {rules!r}; give coordexp.CompletionRules(threshold=0.5, …)")
    tiling = Tiling.asked(tiles, overlap)
    run = completion_config(
        None if model is None else model_folder(model),
        config=None if config is None else Path(config),
        prompt=prompt,
        batch_size=None if batch_size is None else whole_number("batch_size", batch_size),
        arguments=_arguments(overrides),
    )
    with heavy_imports():
        from coordexp.modeling.load import no_progress_bars
    with no_progress_bars():
        done = run_completion(
            run, _console(quiet), source=source, out=completed, rules=rules or CompletionRules(),
            sheet=picture, sheet_images=sheet_images, tiling=tiling,
        )  # fmt: skip
    return None if done is None else done[0]


def _arguments(overrides: Mapping[str, Any] | None) -> list[str]:
    # As words of a command line.
    given = to_jsonable_python(checked_overrides(overrides), fallback=str)
    return [f"{key}={dump_value(value)}" for key, value in given.items()]


def _console(quiet: bool) -> Console:
    from coordexp import distributed
    from coordexp.data.progress_bar import literal_console

    return literal_console(stderr=False, quiet=quiet or not distributed.is_main())
