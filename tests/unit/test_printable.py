"""Names and answers reach terminals, logs, pages and pictures without characters that would change them."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from coordexp.data.progress_bar import literal_console
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers
from coordexp.inference.detections import as_detections
from coordexp.printable import PrintableFilter, printable
from coordexp.records import GTObject
from support.annotation_folders import paint
from support.cli_runs import Cli

CLEAR, TURNED, BELL, NEXT_LINE = "\x1b[2J", "\u202e", "\x07", "\x85"
NAME = f"a{CLEAR}b{TURNED}c{BELL}d{NEXT_LINE}e"
SHOWN = r"a\u001b[2Jb\u202ec\u0007d\u0085e"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAME, SHOWN),
        ("red car, 手提包 é ß 😀 [x]", "red car, 手提包 é ß 😀 [x]"),
        ("one\ntwo\tthree\r", r"one\u000atwo\u0009three\u000d"),
        ("half \ud800", r"half \ud800"),
        ("\x00\x7f\x9b\u2028\u2066", r"\u0000\u007f\u009b\u2028\u2066"),
        (Path("a\x1b.jpg"), r"a\u001b.jpg"),
    ],
)
def test_characters_that_change_other_text_are_written_out(text: object, expected: str) -> None:
    assert printable(text) == expected


def test_of_a_message_lines_and_tabs_stay() -> None:
    assert printable("one\n\ttwo\x1b", lines=True) == "one\n\ttwo\\u001b"


def test_json_reads_back_the_same() -> None:
    assert json.loads(printable(json.dumps({NAME: 1}, ensure_ascii=False))) == {NAME: 1}


def test_a_console_prints_names_and_tables_printably() -> None:
    console = literal_console(stderr=False)
    console.file = io.StringIO()
    console.width = 200
    table = Table("class")
    table.add_row(NAME)
    table.add_row(Text("x" + CLEAR, "bold"))
    console.print(f"found {NAME}", table)
    written = console.file.getvalue()
    assert written.count(SHOWN) == 2 and r"x\u001b" in written
    assert not set(written) & set(CLEAR[0] + TURNED + BELL + NEXT_LINE)


def test_a_log_line_is_printable() -> None:
    record = logging.LogRecord("coordexp", logging.WARNING, "f.py", 1, "no image for %s\nnext", (NAME,), None)
    assert PrintableFilter().filter(record) and record.getMessage() == f"no image for {SHOWN}\nnext"


def test_a_repr_is_one_printable_line() -> None:
    answer = ImageAnswer("s", f"{NAME}\n.png", 10, 10, None, (ScoredObject(NAME, "bbox_2d", (0, 0, 9, 9)),))
    assert repr(as_detections(answer)) == rf"<Detections {SHOWN}\u000a.png 10x10: 1 {SHOWN}>"


def test_commands_and_the_viewers_page_hold_no_control_character(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    paint(tmp_path / "a.png", (64, 48))
    found = (ScoredObject(NAME, "bbox_2d", (0, 0, 900, 900), 0.9, 0.9),)
    truth = (GTObject(NAME, "bbox_2d", (0, 0, 900, 900)),)
    answer = ImageAnswer(NAME, str(tmp_path / "a.png"), 64, 48, truth, found, text=NAME)
    write_answers([answer], tmp_path / "run" / "predictions.jsonl")
    page = tmp_path / "view.html"
    outputs = [
        cli("evaluate", tmp_path / "run"),
        cli("evaluate", tmp_path / "run", "--json"),
        cli("view", tmp_path / "run", "--out", page),
        cli("evaluate", tmp_path / f"none{CLEAR}"),
    ]
    texts = [page.read_text(encoding="utf-8"), *(text for one in outputs for text in (one.out, one.err))]
    assert not set("".join(texts)) & set(CLEAR[0] + TURNED + BELL + NEXT_LINE)
    assert json.loads(outputs[1].out)["by_class"][0]["name"] == NAME, "JSON reads back the same"
    assert SHOWN in outputs[0].out
    assert json.dumps(SHOWN)[1:-1] in texts[0], "the page shows the name written out"
    assert r"none\u001b[2J" in outputs[3].err and outputs[3].code == 2
