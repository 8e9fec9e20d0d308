"""``coordexp data convert``: other annotation formats to the JSONL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coordexp.cli.console import counting, on_interrupt, open_console, with_options
from coordexp.cli.usage import App
from coordexp.errors import DataError

convert_app = App("Convert other annotation formats to JSONL.")

OutDir = Annotated[Path, typer.Option("--out", help="Folder of the JSONL and its images.")]
JsonFile = Annotated[
    Path, typer.Argument(metavar="annotations", help="The JSON file of all annotations, or a folder with one.")
]
FoundImages = Annotated[
    Path | None, typer.Option("--images", help="Folder searched for the images [the annotations' own].")
]
OfInstances = Annotated[Literal["bbox", "poly"], typer.Option(help="Boxes, or segmentation polygons.")]
OfShapes = Annotated[
    Literal["as_annotated", "bbox", "poly"], typer.Option(help="Polygons as they are, their bounds, or polygons only.")
]
CrowdsOption = Annotated[
    Literal["leave_out", "keep"],
    typer.Option(help="Leave groups (iscrowd, IsGroupOf) out, or keep each as one object."),
]
BoxesOption = Annotated[
    Literal["auto", "xywh", "xyxy"],
    typer.Option(help="Numbers of a box: as the format says unless they look like corners; so in any case; corners."),
]


@dataclass(frozen=True)
class FormatOptions:
    """Options of every format: the fields of :class:`coordexp.data.convert.ImageOptions`, None for its default."""

    name: Annotated[
        str | None, typer.Option(help="Name of the JSONL; the split's, the annotation file's or the folder's.")
    ] = None
    resize: Annotated[
        bool, typer.Option(help="Resize images for the model once, now. --no-resize only refers to them.")
    ] = True
    factor: Annotated[
        int | None, typer.Option(help="Sides become multiples of this: the model's patch size x merge size.")
    ] = None
    min_pixels: Annotated[int | None, typer.Option(help="Least area of a resized image, in pixels.")] = None
    max_pixels: Annotated[int | None, typer.Option(help="Largest area of a resized image, in pixels.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset of the same name.")] = False
    keep_emptied: Annotated[
        bool, typer.Option("--keep-emptied", help="Keep images that lost all their objects, as images without objects.")
    ] = False


@dataclass(frozen=True)
class PolygonOptions(FormatOptions):
    """Options of formats with polygons."""

    max_vertices: Annotated[
        int | None, typer.Option(min=3, help="Simplify polygons with more vertices; the report says what that cost.")
    ] = None


def _command(name: str, *examples: str, form: str = "", help: str | None = None, **fixed: Any) -> Callable[..., Any]:
    """Decorate a function without a body, whose parameters (with ``fixed``) are those of
    ``coordexp.data.convert.convert_<form>`` (``form``: by default the command's name), the annotations first: the
    command runs that converter under a progress bar, and prints its report."""
    form = form or name

    def decorate(declared: Callable[..., None]) -> Callable[..., None]:
        source = next(iter(signature(declared).parameters))

        @wraps(declared)
        def run(options: FormatOptions, **given: Any) -> None:
            from coordexp.data import convert

            given_options = {name: value for name, value in asdict(options).items() if value is not None}
            unfinished = "no JSONL was written; the same command starts again"
            with counting("converting") as progress, on_interrupt(unfinished):
                image_options = convert.ImageOptions(**given_options, progress=progress)
                try:
                    report = getattr(convert, f"convert_{form}")(**given, **fixed, options=image_options)
                except DataError as error:
                    command, named = convert.recognise(given[source]) or (form, "")
                    if command == form:
                        raise
                    instead = f"; read it with: coordexp data convert {command}" if command else ""
                    raise DataError(f"{error}; {given[source]} looks like {named}{instead}") from error
            console = open_console()
            console.print(convert.render_report(report))
            console.print(f"wrote {report.jsonl} and {report.path}", soft_wrap=True)

        convert_app.add(name, *examples, help=help)(with_options(run))
        return declared

    return decorate


@_command("voc", "coordexp data convert voc VOCdevkit/VOC2007 --out data/mine --split train --one-based")
def voc_command(
    root: Annotated[
        Path, typer.Argument(help="Folder with Annotations and JPEGImages at any depth, or of XML next to images.")
    ],
    out_dir: OutDir,
    options: FormatOptions,
    split: Annotated[
        str | None, typer.Option(help="A name in ImageSets/Main, or of a part; every annotation when left out.")
    ] = None,
    annotations_dir: Annotated[str, typer.Option("--annotations", help="Folder of the XML files.")] = "Annotations",
    images_dir: Annotated[str, typer.Option("--images", help="Folder of the images.")] = "JPEGImages",
    one_based: Annotated[bool, typer.Option(help="Coordinates count from 1, as in Pascal VOC itself.")] = False,
    skip_difficult: Annotated[bool, typer.Option(help="Leave out objects that are marked difficult.")] = False,
) -> None:
    """Pascal VOC (one XML per image) to JSONL."""


@_command(
    "lvis",
    "coordexp data convert lvis lvis_v1_val.json coco --out data/lvis",
    form="coco",
    help="LVIS to JSONL.",
    lvis=True,
)
@_command("coco", "coordexp data convert coco annotations.json images --out data/mine --name train")
def instances_command(
    annotations_json: JsonFile,
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="images",
            help="Folder that file_name starts in, or, of LVIS, with train2017 and val2017 [the file's own].",
        ),
    ] = None,
    geometry: OfInstances = "bbox",
    crowds: CrowdsOption = "leave_out",
    boxes: BoxesOption = "auto",
) -> None:
    """COCO instances to JSONL."""


@_command("yolo", "coordexp data convert yolo data.yaml --out data/mine --split train")
def yolo_command(
    source: Annotated[
        Path, typer.Argument(help="data.yaml, darknet's obj.data, or a folder with images, labels and classes.txt.")
    ],
    out_dir: OutDir,
    options: PolygonOptions,
    split: Annotated[str | None, typer.Option(help="train, val or test of data.yaml; or a folder of images.")] = None,
    geometry: OfShapes = "as_annotated",
    unlabelled: Annotated[
        Literal["skip", "empty"] | None,
        typer.Option(help="Images without a label file: leave them out, or take them as images without objects."),
    ] = None,
    boxes: BoxesOption = "auto",
    images_dir: Annotated[
        str | None, typer.Option("--images", help="Folder of the images of a folder with classes.txt [images].")
    ] = None,
    labels_dir: Annotated[
        str | None, typer.Option("--labels", help="Folder of the labels of a folder with classes.txt [labels].")
    ] = None,
) -> None:
    """YOLO labels (boxes and polygons) to JSONL."""


@_command("labelme", "coordexp data convert labelme photos --out data/mine")
def labelme_command(
    folder: Annotated[Path, typer.Argument(help="Folder of LabelMe's JSON files; searched with all below it.")],
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: FoundImages = None,
    geometry: OfShapes = "as_annotated",
) -> None:
    """LabelMe (one JSON per image) to JSONL."""


@_command("panoptic", "coordexp data convert panoptic panoptic_val2017.json val2017 --out data/coco --geometry poly")
def panoptic_command(
    annotations_json: JsonFile,
    images_dir: Annotated[Path, typer.Argument(metavar="images", help="Folder that file_name starts in.")],
    out_dir: OutDir,
    options: PolygonOptions,
    segments_dir: Annotated[
        Path | None,
        typer.Option("--segments", help="Folder of the PNGs, for polygons [next to the file, by its name]."),
    ] = None,
    geometry: OfInstances = "bbox",
    crowds: CrowdsOption = "leave_out",
    stuff: Annotated[bool, typer.Option("--stuff", help="Keep regions without instances, such as sky.")] = False,
) -> None:
    """COCO panoptic (a JSON, and PNGs of segments) to JSONL."""


@_command(
    "csv",
    "coordexp data convert csv boxes.csv --images photos --out data/mine",
    "coordexp data convert csv train.csv --images train --desc wheat --columns bbox=box --out data/wheat",
)
def csv_command(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV with a header: image, name, and corners, or x, y, w, h, or bbox; or a folder with one."
        ),
    ],
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: FoundImages = None,
    geometry: OfShapes = "as_annotated",
    columns: Annotated[
        str | None,
        typer.Option(metavar="MEANING=HEADER,…", help="Columns by their headers, e.g. image=img,name=species,x1=left."),
    ] = None,
    desc: Annotated[str | None, typer.Option(help="Name of all objects, for a table without names.")] = None,
    boxes: BoxesOption = "auto",
    normalised: Annotated[
        bool, typer.Option("--normalised", help="Coordinates are shares of the image's sides, 0 to 1.")
    ] = False,
) -> None:
    """CSV (one box a line), such as Kaggle's, to JSONL."""


@_command(
    "openimages",
    "coordexp data convert openimages validation-annotations-bbox.csv --images validation --out data/oi",
)
def openimages_command(
    table: Annotated[Path, typer.Argument(help="CSV of boxes; only the images that are there are read.")],
    out_dir: OutDir,
    options: FormatOptions,
    images_dir: FoundImages = None,
    classes: Annotated[Path | None, typer.Option(help="CSV of class descriptions [the one next to the table].")] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="CSV of labels of whole images: verified classes go into metadata.image_labels."),
    ] = None,
    crowds: CrowdsOption = "leave_out",
) -> None:
    """Open Images (CSV of boxes and of labels) to JSONL."""


@_command("dota", "coordexp data convert dota DOTA/train --out data/dota --name train")
def dota_command(
    folder: Annotated[Path, typer.Argument(help="Folder with labelTxt and images.")],
    out_dir: OutDir,
    options: PolygonOptions,
    labels_dir: Annotated[
        Path | None, typer.Option(help="Folder of the text files [the one that starts with labelTxt].")
    ] = None,
    images_dir: Annotated[
        Path | None, typer.Option("--images", help="Folder searched for the images [images next to the labels].")
    ] = None,
    skip_difficult: Annotated[bool, typer.Option(help="Leave out objects that are marked difficult.")] = False,
    geometry: OfShapes = "as_annotated",
) -> None:
    """DOTA (rotated boxes, a text file per image) to JSONL."""


@_command("cvat", "coordexp data convert cvat annotations.xml --images photos --out data/mine")
def cvat_command(
    source: Annotated[Path, typer.Argument(help="XML of 'CVAT for images 1.1', or a folder with one.")],
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: FoundImages = None,
    split: Annotated[str | None, typer.Option(help="A subset; all images when left out.")] = None,
    geometry: OfShapes = "as_annotated",
) -> None:
    """CVAT for images 1.1 (one XML) to JSONL."""


@_command("labelstudio", "coordexp data convert labelstudio project.json --images photos --out data/mine")
def labelstudio_command(
    source: Annotated[Path, typer.Argument(help="Label Studio's JSON or JSON-MIN, or a folder with one.")],
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: FoundImages = None,
    geometry: OfShapes = "as_annotated",
) -> None:
    """Label Studio (JSON, JSON-MIN) to JSONL."""


@_command("via", "coordexp data convert via via_export.json --images photos --out data/mine")
def via_command(
    source: Annotated[Path, typer.Argument(help="JSON of the VGG Image Annotator, or a folder with one.")],
    out_dir: OutDir,
    options: PolygonOptions,
    images_dir: FoundImages = None,
    attribute: Annotated[str | None, typer.Option(help="Region attribute that contains the class.")] = None,
    geometry: OfShapes = "as_annotated",
) -> None:
    """VGG Image Annotator (JSON) to JSONL."""
