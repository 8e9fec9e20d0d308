"""The size of a plain JPEG by its first bytes, in a small part of the time that Pillow takes to open one.

It refuses nothing: whatever it is not certain of is left to :func:`coordexp.data.images.read_header`, which gives the
same size for each file that has one here; a property test holds the two together.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from PIL import Image

_READ_BYTES = 8192
_START = b"\xff\xd8"
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: what cameras and tools write
_SCAN = 0xDA
_TABLE_BYTES = 65  # of a quantization table of 8 bits, with its number


def _right(body: bytes) -> bool:
    return True


# Segments in which Pillow finds neither a mistake nor an orientation, by their marker. Exif and XMP (0xE1) are not
# among them, nor pictures of several frames (MPF, in 0xE2), nor Photoshop's (0xED).
_HARMLESS: dict[int, Callable[[bytes], bool]] = {
    0xC4: _right,
    0xDB: lambda body: len(body) % _TABLE_BYTES == 0 and not any(first >> 4 for first in body[::_TABLE_BYTES]),
    0xDD: _right,
    0xE0: lambda body: len(body) >= 14,
    0xE2: lambda body: body.startswith(b"ICC_PROFILE\0") and len(body) > 14,
    0xEE: lambda body: len(body) >= 12,
    0xFE: _right,
}


def plain_jpeg_size(image: bytes | str) -> tuple[int, int] | None:
    """(width, height) in pixels of a JPEG that stands upright as stored; None for any other file, and for none."""
    try:
        if not stat.S_ISREG(os.stat(image).st_mode):
            return None
        file = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.read(file, _READ_BYTES)
        finally:
            os.close(file)
    except (OSError, ValueError):  # a NUL in the path
        return None
    return _size(head)


def _size(head: bytes) -> tuple[int, int] | None:
    """Of the segments up to the first scan, all of which must lie in ``head``: what lies behind it no header reader
    looks at."""
    if not head.startswith(_START):
        return None
    size: tuple[int, int] | None = None
    at = len(_START)
    while at + 4 <= len(head) and head[at] == 0xFF:
        marker, length = head[at + 1], head[at + 2] << 8 | head[at + 3]
        end = at + 2 + length
        if length < 2 or end > len(head):
            return None
        if marker == _SCAN:
            return size
        body = head[at + 4 : end]
        if marker in _FRAMES:
            if size is not None or len(body) < 6 or body[0] != 8 or body[5] not in (1, 3, 4):
                return None
            if len(body) != 6 + 3 * body[5]:
                return None
            size = body[3] << 8 | body[4], body[1] << 8 | body[2]
            if not _taken(*size):
                return None
        elif not (marker in _HARMLESS and _HARMLESS[marker](body)):
            return None
        at = end
    return None


def _taken(width: int, height: int) -> bool:
    """Whether Pillow opens an image of this size without a warning."""
    most = Image.MAX_IMAGE_PIXELS
    return min(width, height) > 0 and (most is None or width * height <= most)
