"""Shapes in norm1000 space: boxes, mask IoU, transport between point sets. Torch-free."""

from coordexp.geometry.boxes import (
    Shape,
    aabb,
    aabbs,
    box_iou,
    box_iou_pairs,
    overlapping_boxes,
    pixel_box,
    pixel_ring,
    to_bin,
    to_pixel,
)
from coordexp.geometry.mask_iou import mask_iou, mask_iou_pairs
from coordexp.geometry.transport import barycentric_targets, barycentric_targets_of

__all__ = [
    "Shape",
    "aabb",
    "aabbs",
    "barycentric_targets",
    "barycentric_targets_of",
    "box_iou",
    "box_iou_pairs",
    "mask_iou",
    "mask_iou_pairs",
    "overlapping_boxes",
    "pixel_box",
    "pixel_ring",
    "to_bin",
    "to_pixel",
]
