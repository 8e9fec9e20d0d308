"""Datasets: the JSONL format, images, converters, prompts, generated scenes. Importing this loads no torch."""

from coordexp.data.images import open_rgb
from coordexp.data.jsonl import ObjectOrdering, check_dataset, order_objects, read_jsonl
from coordexp.data.record_line import write_jsonl
from coordexp.data.smart_resize import smart_resize

__all__ = [
    "ObjectOrdering",
    "check_dataset",
    "open_rgb",
    "order_objects",
    "read_jsonl",
    "smart_resize",
    "write_jsonl",
]
