"""The ``coordexp`` command. Everything heavy is imported inside the command that needs it, so ``--help`` is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.errors import CoordExpError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.data.convert import ConversionReport, ImageOptions

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="coordexp",
    help="Train a vision-language model to detect objects by writing them, and teach it on its own answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug's plain traceback is easier to report than a decorated one
)
data_app = typer.Typer(help="Make, convert and check datasets.", no_args_is_help=True)
convert_app = typer.Typer(
    help="Other annotation formats to JSONL, with a report of what was left out.", no_args_is_help=True
)
model_app = typer.Typer(help="Make checkpoints that know the coordinate tokens.", no_args_is_help=True)
config_app = typer.Typer(help="Check configurations.", no_args_is_help=True)
app.add_typer(data_app, name="data")
data_app.add_typer(convert_app, name="convert")
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")


@dataclass
class _Flags:
    """Options of the command as a whole; set by its callback, read when an error leaves it."""

    debug: bool = False


_flags = _Flags()

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]
Resize = Annotated[bool, typer.Option(help="Resize images for the model once, now. --no-resize only refers to them.")]
Factor = Annotated[
    int | None, typer.Option(help="Sides become multiples of this: the model's patch size x merge size.")
]
MinPixels = Annotated[int | None, typer.Option(help="Least area of a resized image, in pixels.")]
MaxPixels = Annotated[int | None, typer.Option(help="Largest area of a resized image, in pixels.")]


class SceneFamily(StrEnum):
    """Families of generated scenes; the keys of ``coordexp.data.scenes.SPECS``."""

    SPARSE = "sparse"
    MODERATE = "moderate"
    FRAMED = "framed"
    DENSE = "dense"


class CocoGeometry(StrEnum):
    """What of a COCO annotation becomes the object's geometry."""

    BBOX = "bbox"
    POLY = "poly"


def _show_version(wanted: bool) -> None:
    if wanted:
        import coordexp

        typer.echo(f"coordexp {coordexp.__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    _flags.debug = debug


@app.command()
def train(config: ConfigFile) -> None:
    """Train as CONFIG.yaml says: stage 1, or stage 2 where custom.trainer_variant names one.

    To go on after an interruption, set training.resume_from_checkpoint: true in the YAML and run the same command.
    """
    from coordexp.config import load_config

    run = load_config(config)  # before the import of torch: a mistake in the YAML shows at once
    from coordexp.training.build import run_training

    console = _console()
    _no_bars_in_log_files()
    run_training(run, console, run.custom.trainer_variant or "stage 1", config)
    console.print(f"saved to {run.training.output_dir}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def evaluate(
    config: ConfigFile,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to evaluate instead of model.model.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL to evaluate on instead of custom.val_jsonl.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of metrics.json and predictions.jsonl [<output_dir>/evaluation].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json on stdout instead of a table.")] = False,
) -> None:
    """Let a checkpoint answer for every image of a dataset, and compare with the ground truth."""
    from coordexp.config import load_config

    run = load_config(config)
    from coordexp.evaluation.report import figures_table
    from coordexp.training.evaluate import run_evaluation

    console = _console(stderr=as_json)
    _no_bars_in_log_files()
    result = run_evaluation(run, console, model=model, data=data, limit=limit, output=output)
    if as_json:
        if not console.quiet:
            typer.echo(result.metrics_json.read_text(encoding="utf-8"), nl=False)
        return
    console.print(figures_table({str(model or run.model.model): result.metrics}, title=str(result.data)))
    found = {name: int(result.metrics[name]) for name in ("images", "gt_objects", "pred_objects", "matched_objects")}
    console.print(
        f"{found['images']} images with {found['gt_objects']} objects; {found['pred_objects']} predicted, "
        f"{found['matched_objects']} of them right",
        highlight=False,
    )
    console.print(
        f"wrote {result.metrics_json} and {result.predictions_jsonl}", highlight=False, markup=False, soft_wrap=True
    )


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the figures, pictures and checkpoints.")] = Path(
        "outputs/demo"
    ),
) -> None:
    """Teach a small detector by rollout matching on this machine's CPU, and show what it learned."""
    from coordexp.demo import run_demo

    run_demo(output, _console())


@convert_app.command("voc")
def convert_voc_command(
    root: Annotated[Path, typer.Argument(help="Folder with Annotations, JPEGImages and ImageSets/Main.")],
    out: Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")],
    split: Annotated[str | None, typer.Option(help="A name in ImageSets/Main; every annotation when left out.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the JSONL; the split's when left out.")] = None,
    annotations_dir: Annotated[str, typer.Option(help="Folder of the XML files.")] = "Annotations",
    images_dir: Annotated[str, typer.Option(help="Folder of the images.")] = "JPEGImages",
    one_based: Annotated[bool, typer.Option(help="Coordinates count from 1, as in Pascal VOC itself.")] = False,
    skip_difficult: Annotated[bool, typer.Option(help="Leave out objects that are marked difficult.")] = False,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """Pascal VOC (one XML per image) to JSONL."""
    from coordexp.data.convert import convert_voc

    options = _image_options(resize, factor, min_pixels, max_pixels)
    with _counting("converting") as progress:
        report = convert_voc(
            root,
            out,
            split=split,
            annotations_dir=annotations_dir,
            images_dir=images_dir,
            name=name,
            one_based=one_based,
            skip_difficult=skip_difficult,
            options=options,
            progress=progress,
        )
    _show_report(report)


@convert_app.command("coco")
def convert_coco_command(
    annotations: Annotated[Path, typer.Argument(help="The instances JSON.")],
    images: Annotated[Path, typer.Argument(help="Folder that file_name starts in.")],
    out: Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")],
    geometry: Annotated[CocoGeometry, typer.Option(help="Boxes, or segmentation polygons.")] = CocoGeometry.BBOX,
    name: Annotated[str | None, typer.Option(help="Name of the JSONL; the annotation file's when left out.")] = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """COCO instances to JSONL."""
    from coordexp.data.convert import convert_coco

    options = _image_options(resize, factor, min_pixels, max_pixels)
    with _counting("converting") as progress:
        report = convert_coco(
            annotations, images, out, geometry=geometry.value, name=name, options=options, progress=progress
        )
    _show_report(report)


@data_app.command("scenes")
def scenes_command(
    out: Annotated[Path, typer.Option(help="Folder of scenes.jsonl and its images.")],
    count: Annotated[int, typer.Option(min=1, help="Number of scenes.")],
    spec: Annotated[SceneFamily, typer.Option(help="How crowded they are.")] = SceneFamily.SPARSE,
    seed: Annotated[int, typer.Option(min=0, help="Scenes of different seeds differ.")] = 0,
) -> None:
    """Draw example scenes: coloured shapes with boxes and polygons."""
    from coordexp.data.scenes import SPECS, write_scenes

    typer.echo(f"wrote {write_scenes(out, count, SPECS[spec.value], seed)}: {count} images")


@data_app.command("check")
def check_command(
    jsonl: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Check only the first N records.")] = None,
) -> None:
    """Read a dataset strictly, open every image's header, and count what it holds."""
    from collections import Counter

    from rich.table import Table
    from rich.text import Text

    from coordexp.data import read_jsonl

    records = read_jsonl(jsonl, limit=limit, check_images=True)
    table = Table("what", "count", title=str(jsonl))
    table.columns[1].justify = "right"
    table.add_row("images", str(len(records)))
    table.add_row("images without objects", str(sum(not record.objects for record in records)))
    for title, counter in (
        ("objects", Counter("all" for record in records for _ in record.objects)),
        ("of geometry", Counter(obj.kind for record in records for obj in record.objects)),
        ("of class", Counter(obj.desc for record in records for obj in record.objects)),
    ):
        table.add_section()
        for name, count in counter.most_common():
            # A Text, because a class may be called "[red] car", which rich would read as markup.
            table.add_row(Text(f"{title} {name}" if title != "objects" else title), str(count))
    _console().print(table)


@model_app.command("tiny")
def tiny_command(
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny Qwen3-VL checkpoint with random weights, for experiments on a CPU."""
    _refuse_filled(out)
    from coordexp.modeling.tiny import build_tiny_checkpoint

    typer.echo(f"wrote {build_tiny_checkpoint(out, seed)}")


@model_app.command("expand-vocab")
def expand_vocab_command(
    checkpoint: Annotated[Path, typer.Argument(help="A Qwen3-VL checkpoint folder; it is left as it is.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
) -> None:
    """Add the 1000 coordinate tokens to a Qwen3-VL checkpoint."""
    from coordexp.modeling.expand_vocab import expand_vocab

    expand_vocab(checkpoint, out)
    typer.echo(f"wrote {out}")


class Dtype(StrEnum):
    """Number types of saved weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@model_app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, such as a run's output_dir.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    dtype: Annotated[Dtype, typer.Option(help="Number type of the weights.")] = Dtype.BFLOAT16,
) -> None:
    """Write a run's model as a plain checkpoint: weights, tokenizer and processor, nothing else."""
    _refuse_filled(out)
    from coordexp.modeling.export import export_checkpoint

    typer.echo(f"wrote {export_checkpoint(checkpoint, out, dtype.value)}")


@config_app.command("check")
def config_check_command(config: ConfigFile) -> None:
    """Validate a configuration and print it with every default filled in."""
    from coordexp.config import load_config, resolved_yaml

    typer.echo(resolved_yaml(load_config(config)), nl=False)


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, 2 an error that the user can cure (no traceback), 130 interrupted.

    Any other exception is a bug and leaves with its traceback.
    """
    _flags.debug = False
    try:
        app(args=argv, prog_name="coordexp")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except CoordExpError as error:
        if _flags.debug:
            raise
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(USER_ERROR)


def _console(stderr: bool = False) -> Console:
    """Where progress and tables go; silent on all ranks but the first."""
    from rich.console import Console

    from coordexp import distributed

    return Console(stderr=stderr, quiet=not distributed.is_main())


def _no_bars_in_log_files() -> None:
    """Silence transformers' own bars (loading and saving shards) where nobody watches them move."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


@contextmanager
def _counting(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with ETA on stderr, where that is a terminal; gives the callback that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("eta"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _image_options(resize: bool, factor: int | None, min_pixels: int | None, max_pixels: int | None) -> ImageOptions:
    from coordexp.data.convert import ImageOptions

    given = {"factor": factor, "min_pixels": min_pixels, "max_pixels": max_pixels}
    return ImageOptions(resize=resize, **{name: value for name, value in given.items() if value is not None})


def _show_report(report: ConversionReport) -> None:
    from coordexp.data.convert import render_report

    console = _console()
    console.print(render_report(report))
    console.print(f"wrote {report.jsonl} and {report.path}", highlight=False, markup=False, soft_wrap=True)


def _refuse_filled(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError("the folder is not empty; name a new one", path=folder)
