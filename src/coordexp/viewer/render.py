"""Collected records → one self-contained HTML file, or the same page served on 127.0.0.1 (for an SSH tunnel, say).

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

_HERE = Path(__file__).parent
_SCRIPT = ("list", "record", "tokens", "curves", "hover", "controls")
_QUALITY = 80
_WORKERS = 4


def render(data: ViewData, image_side: int = 384, progress: Callable[[int, int], None] | None = None) -> str:
    """The page, with each image embedded once: a JPEG of at most ``image_side`` pixels, or why it could not be read."""
    paths = list(dict.fromkeys(record.image for record in data.records))
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
        "curves": data.curves,
        "records": [
            {**asdict(record), "image": index_of[record.image], "file": Path(record.image).name}
            for record in data.records
        ],
    }
    # The script's files in one scope; each may use the ones before it.
    texts = [(_HERE / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPT]
    script = '"use strict";\n(() => {\n' + "\n".join(texts) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    parts = {
        "title": html.escape(data.title),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "data": as_script_data(content),
        "images": as_script_data(images),
        "script": script,
    }
    # One pass over the template, so that placeholders in the inserted text are not replaced.
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: parts[found[1]], page)


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
