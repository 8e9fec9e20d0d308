"""Collected records → one self-contained HTML file, or the same page served on 127.0.0.1 (for an SSH tunnel, say).

Text of models and annotators is only data: it is embedded as JSON that cannot end its element, the page's script shows
it as text only, and the page's policy runs no other script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from coordexp.data.images import open_rgb
from coordexp.errors import DataError
from coordexp.viewer.collect import ViewData

Progress = Callable[[int, int], None]

_HERE = Path(__file__).parent
_SCRIPT = ("list", "record", "tokens", "curves", "hover", "controls")
_QUALITY = 80
_WORKERS = 4


def render(data: ViewData, image_side: int = 384, progress: Progress | None = None) -> str:
    """The page. Each image is embedded once as JPEG, at most ``image_side`` pixels long; the page shows why one could
    not be read."""
    paths = list(dict.fromkeys(record.image for record in data.records))
    place = {path: number for number, path in enumerate(paths)}
    images: list[dict[str, str]] = []
    pool = ThreadPoolExecutor(_WORKERS)
    try:
        for done, image in enumerate(pool.map(lambda path: _embed(Path(path), image_side), paths), start=1):
            images.append(image)
            if progress is not None:
                progress(done, len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    content = {
        "title": data.title,
        "notes": list(data.notes),
        "curves": {name: [list(point) for point in points] for name, points in data.curves.items()},
        "records": [
            {**asdict(record), "image": place[record.image], "file": Path(record.image).name} for record in data.records
        ],
    }
    return _page(data.title, content, images)


def _page(title: str, content: dict[str, Any], images: list[dict[str, str]]) -> str:
    style, script = (_HERE / "page.css").read_text(encoding="utf-8"), _script()
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "style": style,
        "data": as_script_data(content),
        "images": as_script_data(images),
        "script": script,
    }
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    # One pass over the template, so that placeholders in the inserted text are not replaced.
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def _script() -> str:
    """The files of the page's script in one scope; each may use the ones before it."""
    texts = [(_HERE / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPT]
    return '"use strict";\n(() => {\n' + "\n".join(texts) + "})();\n"


def as_script_data(content: Any) -> str:
    """JSON for a ``<script type="application/json">``: none of its characters can end the element or open a comment."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _embed(path: Path, side: int) -> dict[str, str]:
    try:
        image = open_rgb(path)
    except DataError as error:
        return {"error": str(error)}
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_QUALITY)
    return {"src": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")}


def make_server(page: str, port: int = 0) -> ThreadingHTTPServer:
    """A server of ``page`` at ``/`` on 127.0.0.1; port 0 takes a free one. The caller runs and closes it."""
    body = page.encode("utf-8")

    class Page(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:  # the name that http.server calls
            if self.path.split("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Page)
