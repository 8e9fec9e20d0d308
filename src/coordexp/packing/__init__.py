"""Segments → packed rows: which to take, what waits, where every token lands. Torch-free."""

from coordexp.packing.rows import RowSupervision, build_row, segment_ids, supervise_row
from coordexp.packing.select import CarryBuffer, select_segments

__all__ = ["CarryBuffer", "RowSupervision", "build_row", "segment_ids", "select_segments", "supervise_row"]
