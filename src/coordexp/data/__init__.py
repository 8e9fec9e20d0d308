"""Datasets: the JSONL format, images, converters, prompts, generated scenes. Importing this loads no torch."""

from coordexp.data.images import open_rgb
from coordexp.data.jsonl import ObjectOrdering, check_dataset, order_objects, read_jsonl, write_jsonl

__all__ = [
    "ObjectOrdering",
    "check_dataset",
    "open_rgb",
    "order_objects",
    "read_jsonl",
    "write_jsonl",
]
