"""``coordexp data convert``: other annotation formats to the JSONL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordexp.cli.console import counting, open_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordexp.data.convert import ConversionReport, ImageOptions

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
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a dataset of the same name.")]
Resize = Annotated[bool, typer.Option(help="Resize images for the model once, now. --no-resize only refers to them.")]
Factor = Annotated[
    int | None, typer.Option(help="Sides become multiples of this: the model's patch size x merge size.")
]
MinPixels = Annotated[int | None, typer.Option(help="Least area of a resized image, in pixels.")]
MaxPixels = Annotated[int | None, typer.Option(help="Largest area of a resized image, in pixels.")]
MaxVertices = Annotated[
    int | None, typer.Option(min=3, help="Simplify polygons with more vertices; the report says what that cost.")
]


@convert_app.command("voc")
def voc_command(
    root: Annotated[
        Path,
        typer.Argument(
            help="Folder with Annotations, JPEGImages and ImageSets/Main at any depth; or of XML beside images."
        ),
    ],
    out: Out,
    split: Annotated[
        str | None, typer.Option(help="A name in ImageSets/Main, or of a part; every annotation when left out.")
    ] = None,
    name: SplitName = None,
    annotations_dir: Annotated[str, typer.Option(help="Folder of the XML files.")] = "Annotations",
    images_dir: Annotated[str, typer.Option(help="Folder of the images.")] = "JPEGImages",
    one_based: Annotated[bool, typer.Option(help="Coordinates count from 1, as in Pascal VOC itself.")] = False,
    skip_difficult: Annotated[bool, typer.Option(help="Leave out objects that are marked difficult.")] = False,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """Pascal VOC (one XML per image) to JSONL."""
    from coordexp.data.convert import convert_voc

    _convert(
        convert_voc,
        root,
        out,
        split=split,
        annotations_dir=annotations_dir,
        images_dir=images_dir,
        name=name,
        one_based=one_based,
        skip_difficult=skip_difficult,
        options=_image_options(resize, factor, min_pixels, max_pixels, overwrite),
    )


@convert_app.command("coco", help="COCO instances to JSONL.")
@convert_app.command("lvis", help="LVIS to JSONL.")
def instances_command(
    context: typer.Context,
    annotations: Annotated[
        Path, typer.Argument(help="The JSON file of all annotations; of COCO also a folder of Roboflow's.")
    ],
    out: Out,
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
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """COCO or LVIS, by the name under which it was called."""
    from coordexp.data.convert import convert_coco, convert_lvis

    _convert(
        convert_lvis if context.command.name == "lvis" else convert_coco,
        annotations,
        images,
        out,
        geometry=geometry,
        crowds=crowds,
        name=name,
        options=_image_options(resize, factor, min_pixels, max_pixels, overwrite, max_vertices),
    )


@convert_app.command("yolo")
def yolo_command(
    source: Annotated[Path, typer.Argument(help="data.yaml, or a folder with images, labels and classes.txt.")],
    out: Out,
    split: Annotated[str | None, typer.Option(help="train, val or test of data.yaml; or a folder of images.")] = None,
    geometry: OfShapes = "as_annotated",
    name: SplitName = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """YOLO labels (boxes and polygons) to JSONL."""
    from coordexp.data.convert import convert_yolo

    options = _image_options(resize, factor, min_pixels, max_pixels, overwrite, max_vertices)
    _convert(convert_yolo, source, out, split=split, geometry=geometry, name=name, options=options)


@convert_app.command("labelme")
def labelme_command(
    folder: Annotated[Path, typer.Argument(help="Folder of LabelMe's JSON files; searched with all below it.")],
    out: Out,
    images: Annotated[Path | None, typer.Option(help="Folder that imagePath starts in; each file's own.")] = None,
    geometry: OfShapes = "as_annotated",
    name: FolderName = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """LabelMe (one JSON per image) to JSONL."""
    from coordexp.data.convert import convert_labelme

    options = _image_options(resize, factor, min_pixels, max_pixels, overwrite, max_vertices)
    _convert(convert_labelme, folder, out, images_dir=images, geometry=geometry, name=name, options=options)


@convert_app.command("panoptic")
def panoptic_command(
    annotations: Annotated[Path, typer.Argument(help="The JSON file of all annotations.")],
    images: Annotated[Path, typer.Argument(help="Folder that file_name starts in.")],
    out: Out,
    segments: Annotated[
        Path | None, typer.Option(help="Folder of the PNGs, for polygons [beside the file, by its name].")
    ] = None,
    geometry: OfInstances = "bbox",
    crowds: OfCrowds = "leave_out",
    stuff: Annotated[bool, typer.Option("--stuff", help="Keep regions without instances, such as sky.")] = False,
    name: FileName = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """COCO panoptic (a JSON, and PNGs of segments) to JSONL."""
    from coordexp.data.convert import convert_panoptic

    _convert(
        convert_panoptic,
        annotations,
        images,
        out,
        segments_dir=segments,
        geometry=geometry,
        crowds=crowds,
        stuff=stuff,
        name=name,
        options=_image_options(resize, factor, min_pixels, max_pixels, overwrite, max_vertices),
    )


@convert_app.command("csv")
def csv_command(
    table: Annotated[
        Path, typer.Argument(help="CSV with a header: image, name, xmin, ymin, xmax, ymax; or a folder of Roboflow's.")
    ],
    out: Out,
    images: Annotated[Path | None, typer.Option(help="Folder that image names start in; the table's own.")] = None,
    geometry: OfShapes = "as_annotated",
    name: FileName = None,
    max_vertices: MaxVertices = None,
    resize: Resize = True,
    factor: Factor = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    overwrite: Overwrite = False,
) -> None:
    """CSV (one box a line) to JSONL."""
    from coordexp.data.convert import convert_csv

    options = _image_options(resize, factor, min_pixels, max_pixels, overwrite, max_vertices)
    _convert(convert_csv, table, out, images_dir=images, geometry=geometry, name=name, options=options)


def _image_options(
    resize: bool,
    factor: int | None,
    min_pixels: int | None,
    max_pixels: int | None,
    overwrite: bool,
    max_vertices: int | None = None,
) -> ImageOptions:
    from coordexp.data.convert import ImageOptions

    given = {"factor": factor, "min_pixels": min_pixels, "max_pixels": max_pixels, "max_vertices": max_vertices}
    return ImageOptions(
        resize=resize, overwrite=overwrite, **{name: value for name, value in given.items() if value is not None}
    )


def _convert(convert: Callable[..., ConversionReport], *paths: Path | None, **given: Any) -> None:
    """Run a converter under a progress bar, and show its report."""
    from coordexp.data.convert import render_report

    with counting("converting") as progress:
        report = convert(*paths, **given, progress=progress)
    console = open_console()
    console.print(render_report(report))
    console.print(f"wrote {report.jsonl} and {report.path}", soft_wrap=True)
