"""Other annotation formats → the JSONL dataset, ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.
Torch-free.

The arguments of a converter are those of its command, ``coordexp data convert FORMAT``, whose help has their meaning.
Converters raise DataError if a file is missing or of another format, or if nothing is usable.
"""

from coordexp.data.convert.assemble import ImageOptions
from coordexp.data.convert.coco import convert_coco, convert_panoptic
from coordexp.data.convert.csv_table import convert_csv
from coordexp.data.convert.open_images import convert_openimages
from coordexp.data.convert.per_image import convert_dota, convert_labelme, convert_voc
from coordexp.data.convert.per_project import convert_cvat, convert_labelstudio, convert_via
from coordexp.data.convert.recognise import recognise
from coordexp.data.convert.report import ConversionReport, Note, Problem, SkipReason, render_report
from coordexp.data.convert.yolo import convert_yolo

__all__ = [
    "ConversionReport",
    "ImageOptions",
    "Note",
    "Problem",
    "SkipReason",
    "convert_coco",
    "convert_csv",
    "convert_cvat",
    "convert_dota",
    "convert_labelme",
    "convert_labelstudio",
    "convert_openimages",
    "convert_panoptic",
    "convert_via",
    "convert_voc",
    "convert_yolo",
    "recognise",
    "render_report",
]
