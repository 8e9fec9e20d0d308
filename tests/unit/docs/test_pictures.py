"""Pictures of the manual: described, light, and drawn from what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PICTURES = sorted((DOCS / "images").iterdir())
SHOWN = [
    (page.name, alt, target)
    for page in (*sorted(DOCS.glob("*.md")), ROOT / "README.md")
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
]


def test_who_sees_no_picture_reads_what_it_shows() -> None:
    assert [(page, target) for page, alt, target in SHOWN if len(alt.split()) < 4] == []


def test_pictures_are_light_and_shown() -> None:
    shown = {Path(target).name for _, _, target in SHOWN}
    assert [one.name for one in PICTURES if one.stat().st_size >= 300_000 or one.name not in shown] == []


def test_an_svg_is_whole_and_fetches_nothing() -> None:
    for picture in PICTURES:
        if picture.suffix == ".svg":
            text = picture.read_text(encoding="utf-8")
            assert ElementTree.fromstring(text).get("viewBox"), picture.name
            assert "@font-face" not in text and not re.search(r"(?:href|src|url)\W{1,3}https?:", text), picture.name


def test_the_pages_that_people_begin_with_have_pictures() -> None:
    begun = {"quickstart.md", "data.md", "metrics.md", "serving.md", "troubleshooting.md", "viewer.md"}
    assert begun - {page for page, _, _ in SHOWN} == set()


def test_a_terminal_is_drawn_with_its_text_and_colours(tmp_path: Path) -> None:
    out = tmp_path / "terminal.svg"
    command = [sys.executable, str(DOCS / "draw_images.py"), "terminal", "a title", str(out)]
    ansi = "$ coordexp train x.yaml\n\x1b[31merror: no such file\x1b[0m\n"
    subprocess.run(command, input=ansi, text=True, check=True, capture_output=True, timeout=60)
    text = re.sub(r"&#160;|\xa0", " ", out.read_text(encoding="utf-8"))
    assert "$ coordexp train x.yaml" in text and "error: no such file" in text and "a title" in text
    assert ElementTree.fromstring(out.read_text(encoding="utf-8")).get("viewBox")
