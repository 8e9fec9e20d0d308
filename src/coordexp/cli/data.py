"""``coordexp data``: make, convert and check datasets."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli import inspect
from coordexp.cli.console import counting, open_console

if TYPE_CHECKING:
    from coordexp.data.convert import ConversionReport, ImageOptions

data_app = typer.Typer(help="Make, convert and check datasets.", no_args_is_help=True)
convert_app = typer.Typer(
    help="Other annotation formats to JSONL, with a report of what was left out.", no_args_is_help=True
)
data_app.add_typer(convert_app, name="convert")
inspect.register(data_app)

Resize = Annotated[bool, typer.Option(help="Resize images for the model once, now. --no-resize only refers to them.")]
Factor = Annotated[
    int | None, typer.Option(help="Sides become multiples of this: the model's patch size x merge size.")
]
MinPixels = Annotated[int | None, typer.Option(help="Least area of a resized image, in pixels.")]
MaxPixels = Annotated[int | None, typer.Option(help="Largest area of a resized image, in pixels.")]


MaxVertices = Annotated[
    int | None, typer.Option(min=3, help="Simplify polygons with more vertices; the report says what that cost.")
]


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


class ShapeGeometry(StrEnum):
    """What becomes of a format's polygons."""

    AS_ANNOTATED = "as_annotated"
    BBOX = "bbox"


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
    with counting("converting") as progress:
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
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """COCO instances to JSONL."""
    from coordexp.data.convert import convert_coco

    options = _image_options(resize, factor, min_pixels, max_pixels, max_vertices)
    with counting("converting") as progress:
        report = convert_coco(
            annotations, images, out, geometry=geometry.value, name=name, options=options, progress=progress
        )
    _show_report(report)


@convert_app.command("lvis")
def convert_lvis_command(
    annotations: Annotated[Path, typer.Argument(help="The LVIS JSON.")],
    images: Annotated[Path, typer.Argument(help="Folder with the images, or with COCO's train2017 and val2017.")],
    out: Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")],
    geometry: Annotated[CocoGeometry, typer.Option(help="Boxes, or segmentation polygons.")] = CocoGeometry.BBOX,
    name: Annotated[str | None, typer.Option(help="Name of the JSONL; the annotation file's when left out.")] = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """LVIS to JSONL."""
    from coordexp.data.convert import convert_lvis

    options = _image_options(resize, factor, min_pixels, max_pixels, max_vertices)
    with counting("converting") as progress:
        report = convert_lvis(
            annotations, images, out, geometry=geometry.value, name=name, options=options, progress=progress
        )
    _show_report(report)


@convert_app.command("yolo")
def convert_yolo_command(
    source: Annotated[Path, typer.Argument(help="data.yaml, or a folder with images, labels and classes.txt.")],
    out: Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")],
    split: Annotated[str | None, typer.Option(help="train, val or test of data.yaml; or a folder of images.")] = None,
    geometry: Annotated[
        ShapeGeometry, typer.Option(help="Polygons as they are, or their bounds.")
    ] = ShapeGeometry.AS_ANNOTATED,
    name: Annotated[str | None, typer.Option(help="Name of the JSONL; the split's when left out.")] = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """YOLO labels (boxes and polygons) to JSONL."""
    from coordexp.data.convert import convert_yolo

    options = _image_options(resize, factor, min_pixels, max_pixels, max_vertices)
    with counting("converting") as progress:
        report = convert_yolo(
            source, out, split=split, geometry=geometry.value, name=name, options=options, progress=progress
        )
    _show_report(report)


@convert_app.command("labelme")
def convert_labelme_command(
    folder: Annotated[Path, typer.Argument(help="Folder of LabelMe's JSON files; searched with all below it.")],
    out: Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")],
    images: Annotated[Path | None, typer.Option(help="Folder that imagePath starts in; each file's own.")] = None,
    geometry: Annotated[
        ShapeGeometry, typer.Option(help="Polygons as they are, or their bounds.")
    ] = ShapeGeometry.AS_ANNOTATED,
    name: Annotated[str | None, typer.Option(help="Name of the JSONL; the folder's when left out.")] = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
) -> None:
    """LabelMe (one JSON per image) to JSONL."""
    from coordexp.data.convert import convert_labelme

    options = _image_options(resize, factor, min_pixels, max_pixels, max_vertices)
    with counting("converting") as progress:
        report = convert_labelme(
            folder, out, images_dir=images, geometry=geometry.value, name=name, options=options, progress=progress
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


def _image_options(
    resize: bool,
    factor: int | None,
    min_pixels: int | None,
    max_pixels: int | None,
    max_vertices: int | None = None,
) -> ImageOptions:
    from coordexp.data.convert import ImageOptions

    given = {"factor": factor, "min_pixels": min_pixels, "max_pixels": max_pixels, "max_vertices": max_vertices}
    return ImageOptions(resize=resize, **{name: value for name, value in given.items() if value is not None})


def _show_report(report: ConversionReport) -> None:
    from coordexp.data.convert import render_report

    console = open_console()
    console.print(render_report(report))
    console.print(f"wrote {report.jsonl} and {report.path}", highlight=False, markup=False, soft_wrap=True)
