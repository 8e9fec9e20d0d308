"""``coordexp data convert``: other annotation formats to the JSONL."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordexp.cli.console import counting, open_console, with_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordexp.data.convert import ConversionReport

convert_app = typer.Typer(
    help="Other annotation formats to JSONL, with a report of what was left out.", no_args_is_help=True
)

Out = Annotated[Path, typer.Option(help="Folder of the JSONL and its images.")]
SplitName = Annotated[str | None, typer.Option(help="Name of the JSONL; the split's, or data, when left out.")]
FileName = Annotated[str | None, typer.Option(help="Name of the JSONL; the annotation file's when left out.")]
FolderName = Annotated[str | None, typer.Option(help="Name of the JSONL; the folder's when left out.")]
OfInstances = Annotated[Literal["bbox", "poly"], typer.Option(help="Boxes, or segmentation polygons.")]
OfShapes = Annotated[
    Literal["as_annotated", "bbox", "poly"], typer.Option(help="Polygons as they are, their bounds, or polygons only.")
]
OfCrowds = Annotated[
    Literal["leave_out", "keep"], typer.Option(help="Leave groups (iscrowd) out, or keep each as one object.")
]


@dataclass(frozen=True)
class OfImages:
    """Options of every format: the fields of :class:`coordexp.data.convert.ImageOptions`, None for its default."""

    resize: Annotated[
        bool, typer.Option(help="Resize images for the model once, now. --no-resize only refers to them.")
    ] = True
    factor: Annotated[
        int | None, typer.Option(help="Sides become multiples of this: the model's patch size x merge size.")
    ] = None
    min_pixels: Annotated[int | None, typer.Option(help="Least area of a resized image, in pixels.")] = None
    max_pixels: Annotated[int | None, typer.Option(help="Largest area of a resized image, in pixels.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset of the same name.")] = False


@dataclass(frozen=True)
class OfPolygons(OfImages):
    """Options of formats with polygons."""

    max_vertices: Annotated[
        int | None, typer.Option(min=3, help="Simplify polygons with more vertices; the report says what that cost.")
    ] = None


@convert_app.command("voc")
@with_options
def voc_command(
    root: Annotated[
        Path,
        typer.Argument(
            help="Folder with Annotations, JPEGImages and ImageSets/Main at any depth; or of XML next to images."
        ),
    ],
    out: Out,
    options: OfImages,
    split: Annotated[
        str | None, typer.Option(help="A name in ImageSets/Main, or of a part; every annotation when left out.")
    ] = None,
    name: SplitName = None,
    annotations_dir: Annotated[str, typer.Option(help="Folder of the XML files.")] = "Annotations",
    images_dir: Annotated[str, typer.Option(help="Folder of the images.")] = "JPEGImages",
    one_based: Annotated[bool, typer.Option(help="Coordinates count from 1, as in Pascal VOC itself.")] = False,
    skip_difficult: Annotated[bool, typer.Option(help="Leave out objects that are marked difficult.")] = False,
) -> None:
    """Pascal VOC (one XML per image) to JSONL."""
    from coordexp.data.convert import convert_voc

    _convert(
        convert_voc,
        root,
        out,
        options=options,
        split=split,
        annotations_dir=annotations_dir,
        images_dir=images_dir,
        name=name,
        one_based=one_based,
        skip_difficult=skip_difficult,
    )


@convert_app.command("coco", help="COCO instances to JSONL.")
@convert_app.command("lvis", help="LVIS to JSONL.")
@with_options
def instances_command(
    context: typer.Context,
    annotations: Annotated[
        Path, typer.Argument(help="The JSON file of all annotations; of COCO also a folder of Roboflow's.")
    ],
    out: Out,
    options: OfPolygons,
    images: Annotated[
        Path | None,
        typer.Argument(
            help="Folder that file_name starts in; of LVIS also one with train2017 and val2017.",
            show_default="the file's own",
        ),
    ] = None,
    geometry: OfInstances = "bbox",
    crowds: OfCrowds = "leave_out",
    name: FileName = None,
) -> None:
    """COCO or LVIS, by the name under which it was called."""
    from coordexp.data.convert import convert_coco, convert_lvis

    convert = convert_lvis if context.command.name == "lvis" else convert_coco
    _convert(convert, annotations, images, out, options=options, geometry=geometry, crowds=crowds, name=name)


@convert_app.command("yolo")
@with_options
def yolo_command(
    source: Annotated[Path, typer.Argument(help="data.yaml, or a folder with images, labels and classes.txt.")],
    out: Out,
    options: OfPolygons,
    split: Annotated[str | None, typer.Option(help="train, val or test of data.yaml; or a folder of images.")] = None,
    geometry: OfShapes = "as_annotated",
    name: SplitName = None,
) -> None:
    """YOLO labels (boxes and polygons) to JSONL."""
    from coordexp.data.convert import convert_yolo

    _convert(convert_yolo, source, out, options=options, split=split, geometry=geometry, name=name)


@convert_app.command("labelme")
@with_options
def labelme_command(
    folder: Annotated[Path, typer.Argument(help="Folder of LabelMe's JSON files; searched with all below it.")],
    out: Out,
    options: OfPolygons,
    images: Annotated[Path | None, typer.Option(help="Folder that imagePath starts in; each file's own.")] = None,
    geometry: OfShapes = "as_annotated",
    name: FolderName = None,
) -> None:
    """LabelMe (one JSON per image) to JSONL."""
    from coordexp.data.convert import convert_labelme

    _convert(convert_labelme, folder, out, options=options, images_dir=images, geometry=geometry, name=name)


@convert_app.command("panoptic")
@with_options
def panoptic_command(
    annotations: Annotated[Path, typer.Argument(help="The JSON file of all annotations.")],
    images: Annotated[Path, typer.Argument(help="Folder that file_name starts in.")],
    out: Out,
    options: OfPolygons,
    segments: Annotated[
        Path | None, typer.Option(help="Folder of the PNGs, for polygons [next to the file, by its name].")
    ] = None,
    geometry: OfInstances = "bbox",
    crowds: OfCrowds = "leave_out",
    stuff: Annotated[bool, typer.Option("--stuff", help="Keep regions without instances, such as sky.")] = False,
    name: FileName = None,
) -> None:
    """COCO panoptic (a JSON, and PNGs of segments) to JSONL."""
    from coordexp.data.convert import convert_panoptic

    _convert(
        convert_panoptic,
        annotations,
        images,
        out,
        options=options,
        segments_dir=segments,
        geometry=geometry,
        crowds=crowds,
        stuff=stuff,
        name=name,
    )


@convert_app.command("csv")
@with_options
def csv_command(
    table: Annotated[
        Path, typer.Argument(help="CSV with a header: image, name, xmin, ymin, xmax, ymax; or a folder of Roboflow's.")
    ],
    out: Out,
    options: OfPolygons,
    images: Annotated[Path | None, typer.Option(help="Folder that image names start in; the table's own.")] = None,
    geometry: OfShapes = "as_annotated",
    name: FileName = None,
) -> None:
    """CSV (one box a line) to JSONL."""
    from coordexp.data.convert import convert_csv

    _convert(convert_csv, table, out, options=options, images_dir=images, geometry=geometry, name=name)


def _convert(convert: Callable[..., ConversionReport], *paths: Path | None, options: OfImages, **given: Any) -> None:
    """Run a converter under a progress bar, and print its report."""
    from coordexp.data.convert import ImageOptions, render_report

    image_options = ImageOptions(**{name: value for name, value in asdict(options).items() if value is not None})
    with counting("converting") as progress:
        report = convert(*paths, **given, options=image_options, progress=progress)
    console = open_console()
    console.print(render_report(report))
    console.print(f"wrote {report.jsonl} and {report.path}", soft_wrap=True)
