"""How an image travels to a rollout server: its path, or its file's own bytes. It is encoded anew only where the server
would otherwise show its model other pixels than the learner's."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Literal

from coordexp.data.images import open_rgb, read_header
from coordexp.data.preparation import ImagePreparation
from coordexp.data.shards import image_bytes, shard_of

# What every reader opens alike, and what is small as it is: bitmaps and TIFF would be longer than a PNG of them.
_COMPRESSED = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}


def image_source(path: Path, images: Literal["path", "base64"], preparation: ImagePreparation, ours: bool) -> str:
    """What stands for an image in a request: an absolute path, or a data URL. (Base64 alone would not do: that of every
    JPEG begins as a path does, ``/9j/``.)

    Args:
        images: whether the server sees the learner's files. preparation: what the learner does to an image.
        ours: the server opens images as the learner does (``coordexp serve``): turned as EXIF says, transparency on
            white, out of tar files. Others do none of it.

    Raises:
        DataError: the file is missing, or no image.
    """
    if ours and images == "path" and preparation.resize is None:
        return str(path)
    header = read_header(path)
    plain = ours or (header.orientation == 1 and header.opaque)
    if preparation.changes(*header.size) or not plain:
        return _as_png(path, preparation)
    if images == "path" and (ours or shard_of(str(path)) is None):
        return str(path)
    if header.format not in _COMPRESSED:
        return _as_png(path, preparation)
    return _data_url(image_bytes(path), _COMPRESSED[header.format])


def _as_png(path: Path, preparation: ImagePreparation) -> str:
    """The pixels that the learner's own encoder sees, without loss. zlib's fastest level: the way is short."""
    encoded = io.BytesIO()
    preparation(open_rgb(path)).save(encoded, format="PNG", compress_level=1)
    return _data_url(encoded.getvalue(), "png")


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
