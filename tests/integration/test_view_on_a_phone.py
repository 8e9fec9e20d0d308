"""The viewer on a phone of 390 x 844 pixels: nothing is cut off, and fingers reach every control."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.evaluation.answers import ImageAnswer, write_answers
from coordexp.viewer.collect import ViewData, collect, compare
from coordexp.viewer.render import render
from support.answers import tiny_vocab
from support.browser import Browser, open_browser
from support.scored_answers import answered_again, random_answers
from support.view_runs import HOSTILE, hostile_answers, write_run

WIDTH = 390
# Visible elements that reach over an edge of the page and are in no box that scrolls by itself.
CUT_OFF = """
const scrolls = (e) => e && e !== document.body
  && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
return [...document.querySelectorAll("body *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && box.height && !scrolls(e.parentElement) && (box.right > innerWidth + 1 || box.left < -1);
}).map((e) => e.outerHTML.slice(0, 80));
"""
# Controls that are shown, by what they are: their size, and whether a finger at their middle meets them.
CONTROLS = """
return Object.fromEntries([...document.querySelectorAll("button, select, input, label:has(input)")].map((e) => {
  e.scrollIntoView({block: "center"});
  const box = e.getBoundingClientRect(), met = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return [e.id || e.textContent.trim().slice(0, 30), [box.width, box.height, e.contains(met) || met?.contains(e)]];
}).filter(([, [width]]) => width));
"""
# Of the first picture: its box; how far outlines and labels reach from its one edge to the other, in its widths.
PICTURE = """
const stage = document.querySelector("#stages .stage"), box = stage.getBoundingClientRect();
const ends = (css) => Math.max(...[...stage.querySelectorAll(css)].map((e) => {
  const one = e.getBoundingClientRect();
  return Math.max((one.right - box.x) / box.width, (box.right - one.left) / box.width);
}));
return [box.x, box.right, box.height, ends("polygon"), ends(".label")];
"""


@pytest.fixture(scope="module")
def phone() -> Iterator[Browser]:
    with open_browser() as window:
        window.as_phone()
        yield window


def with_pictures(folder: Path, of_run: Sequence[ImageAnswer]) -> ViewData:
    """Answers, as ``predict`` writes them, for images that exist."""
    answers = []
    for one in of_run:
        image = folder / f"{one.sample_id}.png"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (one.width, one.height), "gray").save(image)
        answers.append(replace(one, image=str(image)))
    write_answers(answers, folder / "predictions.jsonl")
    return collect(folder)


def pages(folder: Path) -> dict[str, ViewData]:
    hostile, answers = folder / "hostile", random_answers(9, 1)
    write_answers(hostile_answers(folder), hostile / "predictions.jsonl")
    return {
        "predict": with_pictures(folder / "predict", random_answers(9, 3)),
        "run": collect(write_run(folder / "run", steps=4), tiny_vocab()),
        "two runs": compare(
            with_pictures(folder / "a", answers), with_pictures(folder / "b", answered_again(answers, 2))
        ),
        "long names": replace(collect(hostile), title=HOSTILE),
    }


def shown(phone: Browser, data: ViewData, folder: Path) -> Browser:
    page = folder / "page.html"
    page.write_text(render(data), encoding="utf-8")
    phone.open(page.as_uri())
    return phone


def sideways(page: Browser) -> list[Any]:
    """Width of the screen, that of the whole page, and what is cut off: as it is after scrolling is impossible."""
    return [*page.run("return [innerWidth, document.documentElement.scrollWidth]"), page.run(CUT_OFF)]


@pytest.mark.parametrize("kind", ["predict", "run", "two runs", "long names"])
def test_no_view_scrolls_sideways(phone: Browser, tmp_path: Path, kind: str) -> None:
    page = shown(phone, pages(tmp_path)[kind], tmp_path)
    assert sideways(page) == [WIDTH, WIDTH, []]
    for control in ("#help-button", "#grid-button"):
        page.tap(control)
        assert sideways(page) == [WIDTH, WIDTH, []], control
    assert page.count("#grid .tile") > 0
    page.tap("#grid .tile")
    page.tap("#stages .stage")
    assert page.run("return document.querySelector('#zoom').open") is True
    assert sideways(page) == [WIDTH, WIDTH, []]
    page.tap("#zoom-close")
    assert page.run("return document.querySelector('#zoom').open") is False
    assert page.problems() == []


@pytest.mark.parametrize("kind", ["predict", "run", "two runs", "long names"])
def test_the_picture_fits_with_its_outlines_and_labels(phone: Browser, tmp_path: Path, kind: str) -> None:
    page = shown(phone, pages(tmp_path)[kind], tmp_path)
    left, right, height, outlines, labels = page.run(PICTURE)
    assert left >= 0 and right <= WIDTH
    assert right - left > 300 or height > 400, "an upright picture is bounded by the height"
    assert 0 < outlines <= 1.02 and 0 < labels <= 1.01
    assert page.run("return [...document.querySelectorAll('#stages img')].every((e) => e.naturalWidth > 0)") is True


def test_fingers_reach_every_control(phone: Browser, tmp_path: Path) -> None:
    page = shown(phone, pages(tmp_path)["run"], tmp_path)
    controls = page.run(CONTROLS)
    assert {"search", "filter", "order", "step", "grid-button", "save-list", "theme", "help-button", "show-gt"} <= set(
        controls
    )
    fields = {
        name: sizes for name, sizes in controls.items() if not name.startswith("show-")
    }  # their labels are larger
    small = {name: sizes for name, sizes in fields.items() if sizes[0] < 32 or sizes[1] < 32}
    assert small == {} and all(met for _, _, met in controls.values()), controls
    sizes = page.run(
        "return [...document.querySelectorAll('input, select')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 16, "a phone enlarges the page around a field with smaller text"


def test_a_finger_chooses_records_and_hides_predictions(phone: Browser, tmp_path: Path) -> None:
    page = shown(phone, pages(tmp_path)["run"], tmp_path)
    page.tap('#list [data-number="1"]')
    assert page.text("#name") == "sample 1"
    visible = (
        "return [...document.querySelectorAll('.stage .pred')].filter((e) => e.getBoundingClientRect().width).length"
    )
    assert page.run(visible) > 0
    page.tap("#show-pred")
    assert page.run(visible) == 0
