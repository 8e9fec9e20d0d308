"""Other annotation formats → the JSONL dataset. Torch-free."""

from coordexp.data.convert.assemble import ImageOptions, to_bin
from coordexp.data.convert.coco import convert_coco
from coordexp.data.convert.report import ConversionReport, Note, Problem, SkipReason, render_report
from coordexp.data.convert.voc import convert_voc

__all__ = [
    "ConversionReport",
    "ImageOptions",
    "Note",
    "Problem",
    "SkipReason",
    "convert_coco",
    "convert_voc",
    "render_report",
    "to_bin",
]
