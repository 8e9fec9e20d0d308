"""The smallest possible image files, named by number."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from PIL import Image


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="coordexp-numbered-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def numbered_image(number: int) -> Path:
    """``…/<number>.png``; made with its first use."""
    path = _folder() / f"{number}.png"
    if not path.exists():
        Image.new("RGB", (1, 1)).save(path)
    return path
