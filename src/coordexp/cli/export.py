"""``coordexp export``: predictions in the terms of other tools."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import open_console, say, say_written
from coordexp.errors import ConfigError


class Format(StrEnum):
    """Keys of ``coordexp.evaluation.export.FORMATS``."""

    COCO = "coco"
    YOLO = "yolo"
    VOC = "voc"
    LABELME = "labelme"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(export)


def export(
    form: Annotated[Format, typer.Argument(metavar="FORMAT", help="coco, yolo, voc, labelme or csv.")],
    predictions: Annotated[
        Path, typer.Argument(metavar="PREDICTIONS", help="A predictions.jsonl, or a folder that holds one.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of what is written.")],
    annotations: Annotated[
        Path | None, typer.Option(help="Your COCO file, whose ids of images and categories are kept. For coco.")
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(help="Your class names, one a line, or a data.yaml; their numbers are kept. For yolo."),
    ] = None,
    min_score: Annotated[float | None, typer.Option(min=0, max=1, help="Leave out what is less sure.")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Append scores to lines. For yolo.")] = False,
) -> None:
    """Write predictions as COCO results, YOLO labels, VOC or LabelMe files or CSV, in pixels of the original images."""
    from coordexp.evaluation import read_answers
    from coordexp.evaluation.export import FORMATS, read_terms

    given = {"--annotations": (annotations, Format.COCO), "--classes": (classes, Format.YOLO),
             "--scores": (scores or None, Format.YOLO)}  # fmt: skip
    for option, (value, user) in given.items():
        if value is not None and form is not user:
            raise ConfigError(f"{option} has no use here; it belongs to {user.value}")
    answers = read_answers(predictions)
    console = open_console()
    if min_score is not None:
        kept = [replace(a, pred=tuple(o for o in a.pred if o.score is None or o.score >= min_score)) for a in answers]
        left_out = sum(len(a.pred) for a in answers) - sum(len(a.pred) for a in kept)
        say(console, f"{left_out} objects of a score below {min_score:g} are left out")
        answers = kept
    options = {"scores": scores} if form is Format.YOLO else {}
    exported = FORMATS[form.value](answers, out, read_terms(annotations, classes), **options)
    for note in exported.notes:
        say(console, f"note: {note}")
    say(console, f"{sum(len(answer.pred) for answer in answers)} objects in {len(answers)} images")
    say_written(console, exported.files)
