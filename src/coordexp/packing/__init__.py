"""Segments → packed rows: which to take, which wait, where every token is. Torch-free."""

from coordexp.packing.rows import build_row
from coordexp.packing.select import CarryBuffer, select_segments

__all__ = ["CarryBuffer", "build_row", "select_segments"]
