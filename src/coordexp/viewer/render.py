"""Collected records → one self-contained HTML file.

Text of models and annotators is only data: it is embedded as JSON that cannot end its element, the page's script shows
it as text only, and the page's policy forbids other scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from coordexp.data.images import open_rgb
from coordexp.errors import DataError
from coordexp.printable import printable
from coordexp.viewer.collect import ViewData, ViewRecord

_HERE = Path(__file__).parent
_SCRIPT = ("list", "record", "tokens", "grid", "curves", "hover", "controls")
_QUALITY = 80
_WORKERS = 4
_SIDES = {50: 1024, 200: 640}  # longest side of embedded images, by the largest number of them; more get the last
_LEAST_SIDE = 384
_SAVED = ("path", "saved_desc")  # keys of texts that are saved, not shown


def render(
    data: ViewData,
    image_side: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    version: str | None = None,
    follow: bool = False,
) -> str:
    """The page, with each image embedded once, as a JPEG or as why it could not be read.

    ``image_side``: longest side of the JPEGs in pixels; by default 1024 for up to 50 images, 640 for up to 200, else
    384. ``version``: given to a page that is served: it enlarges the original images at ``image/N``, N as in
    :func:`image_paths`, and with ``follow`` loads itself again when ``/version`` differs.
    """
    paths = image_paths(data)
    if image_side is None:
        image_side = next((side for most, side in _SIDES.items() if len(paths) <= most), _LEAST_SIDE)
    images: list[dict[str, str]] = []
    pool = ThreadPoolExecutor(_WORKERS)
    try:
        for done, image in enumerate(pool.map(lambda path: _embed(Path(path), image_side), paths), start=1):
            images.append(image)
            if progress is not None:
                progress(done, len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    index_of = {path: number for number, path in enumerate(paths)}
    content = {
        "title": data.title,
        "notes": data.notes,
        "runs": data.runs,
        "served": version is not None,
        "follow": follow,
        "version": version,
        "curves": data.curves,
        "records": [_record(record, index_of) for record in data.records],
    }
    # The script's files in one scope; each may use the ones before it.
    texts = [(_HERE / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPT]
    script = '"use strict";\n(() => {\n' + "\n".join(texts) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    own = " 'self'" if version is not None else ""
    parts = {
        "title": html.escape(printable(data.title)),
        "policy": f"default-src 'none'; img-src data:{own}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        + ("; connect-src 'self'" if version is not None else ""),
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "data": as_script_data(_shown(content)),
        "images": as_script_data(images),
        "script": script,
    }
    # One pass over the template, so that placeholders in the inserted text are not replaced.
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: parts[found[1]], page)


def image_paths(data: ViewData) -> list[str]:
    """The different images of the records, in order of first use."""
    return list(dict.fromkeys(record.image for record in data.records))


def _record(record: ViewRecord, index_of: Mapping[str, int]) -> dict[str, Any]:
    written = {**asdict(record), "image": index_of[record.image], "file": Path(record.image).name, "path": record.image}
    for one in (*written["gt"], *written["pred"]):
        if printable(one["desc"]) != one["desc"]:
            one["saved_desc"] = one["desc"]
    if record.other is not None:
        written["other"] = _record(record.other, {record.other.image: index_of[record.image]})
    return written


def _shown(content: Any) -> Any:
    if isinstance(content, str):
        return printable(content, lines=True)
    if isinstance(content, Mapping):
        return {key: value if key in _SAVED else _shown(value) for key, value in content.items()}
    return [_shown(value) for value in content] if isinstance(content, list | tuple) else content


def as_script_data(content: Any) -> str:
    """JSON for a ``<script type="application/json">``: none of its characters can end the element, open a comment or
    turn the direction of the file's text."""
    text = printable(json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _embed(path: Path, side: int) -> dict[str, str]:
    try:
        image = open_rgb(path)
    except DataError as error:
        return {"error": printable(error, lines=True)}
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_QUALITY)
    return {"src": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")}
