"""Which pictures of the manual are older than what draws them (docs/pictures.py), decided by content."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "pictures.py"
CODE = '"""What it draws."""\n\n\ndef draw(side: int) -> int:\n    """A square."""\n    return side * 2  # twice\n'


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a repository with one picture, which is drawn."""
    spec = importlib.util.spec_from_file_location("pictures_of_the_manual", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    (tmp_path / "images").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "draw.py").write_text(CODE)
    (tmp_path / "code" / "page.css").write_text("a { color: red }")

    def draw(out: Path, folder: Path) -> None:
        out.write_text(f"drawn in {folder.is_dir()}")

    picture = module.Picture("a.svg", draw, ("code",))
    for name, value in {"ROOT": tmp_path, "IMAGES": tmp_path / "images", "RECORD": tmp_path / "images" / "drawn.json",
                        "PICTURES": (picture,), "COMPARED": {}, "BY_HAND": (), "OF_RUNS": {}}.items():  # fmt: skip
        monkeypatch.setattr(module, name, value)
    run(module, monkeypatch)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures.py", *words])
    module.main()


def reasons(module: ModuleType) -> list[str]:
    return [why for _, why in module.out_of_date()]


def test_a_picture_that_was_just_drawn_is_up_to_date(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (pictures.IMAGES / "a.svg").read_text() == "drawn in True"
    assert set(json.loads(pictures.RECORD.read_text())["a.svg"]) == {"drawn_from", "picture"}
    assert reasons(pictures) == [] and pictures.strangers() == []
    run(pictures, monkeypatch, "--check")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("draw.py", CODE.replace("side * 2", "side * 3")),
        ("page.css", "a { color: blue }"),
        ("more.js", "1"),
    ],
)
def test_it_is_older_than_changed_code(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    (pictures.ROOT / "code" / file).write_text(text)
    assert reasons(pictures) == ["is older than what draws it (code)"]
    with pytest.raises(SystemExit, match=r"a\.svg is older than what draws it .*; run: make docs"):
        run(pictures, monkeypatch, "--check")
    run(pictures, monkeypatch)
    assert reasons(pictures) == []


@pytest.mark.parametrize(
    "text", [CODE.replace("  # twice", ""), CODE.replace("A square", "Squares"), CODE + "\n\n# end"]
)
def test_comments_docstrings_and_empty_lines_of_python_do_not_count(pictures: ModuleType, text: str) -> None:
    (pictures.ROOT / "code" / "draw.py").write_text(text)
    assert reasons(pictures) == []


def test_a_picture_that_was_replaced_or_is_gone_is_drawn_again(pictures: ModuleType) -> None:
    (pictures.IMAGES / "a.svg").write_text("painted")
    assert reasons(pictures) == ["is not the picture that was drawn"]
    (pictures.IMAGES / "a.svg").unlink()
    assert reasons(pictures) == ["is missing"]


def test_a_picture_that_nothing_draws_is_named(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures.IMAGES / "b.png").write_text("")
    with pytest.raises(SystemExit, match=r"b\.png: nothing draws it"):
        run(pictures, monkeypatch, "--check")


def test_a_missing_program_leaves_the_picture_out_of_date(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (picture,) = pictures.PICTURES
    needy = pictures.Picture("a.svg", picture.draw, ("code",), ("no-such-browser",))
    monkeypatch.setattr(pictures, "PICTURES", (needy,))
    (pictures.ROOT / "code" / "page.css").write_text("")
    run(pictures, monkeypatch)
    assert "stays as it is; no-such-browser is not installed" in capsys.readouterr().out
    assert reasons(pictures) != []


def test_the_studys_picture_is_older_than_a_change_of_what_it_compares() -> None:
    """Its rows are declared in arms.yaml."""
    spec = importlib.util.spec_from_file_location("pictures_as_they_are", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    (picture,) = [one for one in module.PICTURES if one.file == "when-it-helps.svg"]
    assert "studies/when_stage2_helps/arms.yaml" in picture.code
