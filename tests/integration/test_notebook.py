"""The notebooks' cells run in order, as a user would run them, and show what their text says."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.checkpoints.card import read_card

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("quickstart", "incomplete_annotations")
MAX_BYTES = 500_000
MAX_DATA_BYTES = 2_000_000


def path_of(notebook: str) -> Path:
    return ROOT / "examples" / f"{notebook}.ipynb"


def code_cells(notebook: str) -> list[dict[str, Any]]:
    cells = json.loads(path_of(notebook).read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source_of(notebook: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in code_cells(notebook))


def run_cells(source: str, folder: Path) -> str:
    """Run a notebook's cells in ``folder``, which is next to what a clone has next to it; returns what they print."""
    if not folder.is_dir():
        folder.mkdir()
        (folder / "blood_cells").symlink_to(ROOT / "examples" / "blood_cells")
        (folder.parent / "studies").symlink_to(ROOT / "studies")
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def f1(printed: str) -> tuple[float, float]:
    """Before and after training."""
    (found,) = re.findall(r"^f1 +([\d.]+) -> ([\d.]+)$", printed, re.M)
    return float(found[0]), float(found[1])


def marked(printed: str) -> dict[str, int]:
    """Boxes that the models draw on the four test photographs."""
    return {name: int(count) for name, count in re.findall(r"^(start|as annotated|completed) +(\d+) ", printed, re.M)}


def check_counts(printed: str) -> None:
    """Counts of ``incomplete_annotations`` that depend on no model, or little."""
    assert "train: 6 photographs, 82 boxes by BCCD, 136 by TXL-PBC" in printed
    assert "test: 4 photographs, 67 boxes by BCCD, 97 by TXL-PBC" in printed
    assert "annotated: 147 of 233 cells, 63%" in printed
    ((added, confirmed, missing),) = re.findall(r"^added: (\d+) boxes; (\d+) are .* the (\d+) missing", printed, re.M)
    assert int(missing) == 54 and 45 <= int(added) <= 65 and int(confirmed) >= 22
    # Of 97 cells. In four runs (other seeds and rates) completed annotations gave 15 to 29 boxes more than those as
    # they are, and these 35 to 38 fewer than the start. How many are right varies too much on four photographs.
    count = marked(printed)
    assert count["as annotated"] + 15 <= count["start"] and count["as annotated"] + 3 <= count["completed"]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_stored_outputs_are_small_pictures_and_no_errors(notebook: str) -> None:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 3 and path_of(notebook).stat().st_size < MAX_BYTES
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
            image.verify()
    assert all(output.get("name") != "stderr" and output["output_type"] != "error" for output in outputs)


def stored(notebook: str) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def test_stored_outputs_of_the_quickstart_show_an_improvement() -> None:
    before, after = f1(stored("quickstart"))
    assert after > before + 0.5


def test_the_quickstart_improves_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    source = source_of("quickstart")
    # All cells once more in the same kernel, with one step.
    printed = run_cells(f'{source}\nprint("AGAIN")\n{source.replace("max_steps: 100", "max_steps: 1")}', folder)
    first, again = printed.split("AGAIN\n")
    assert first.count("val 32 images, 56 objects: {'button': 56}") == again.count("val 32 images, 56 objects") == 1
    before, after = f1(first)
    assert before < 0.1 and after > 0.5
    with Image.open(folder / "drawn.png") as drawn:
        assert drawn.size == (384, 288), "the pixels of the image as given, though the model saw a smaller copy"
    rule = read_card(folder / "outputs" / "stage1").preparation.resize
    assert rule is not None and rule.max_pixels == 96 * 96


def test_stored_outputs_show_what_annotators_left_out() -> None:
    check_counts(stored("incomplete_annotations"))


def test_training_on_incomplete_annotations_teaches_to_leave_cells_out(tmp_path: Path) -> None:
    check_counts(run_cells(source_of("incomplete_annotations"), tmp_path / "examples"))


def test_the_photographs_are_small_and_have_their_licences() -> None:
    files = [path for path in (ROOT / "examples" / "blood_cells").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_DATA_BYTES
    assert sum(path.suffix == ".jpg" for path in files) == 10
    for name in ("LICENSE-BCCD", "LICENSE-TXL-PBC"):
        assert "MIT License" in (ROOT / "examples" / "blood_cells" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("there", "named"), [("", "--bccd"), ("BCCD/Annotations", "--txl")])
def test_the_study_of_these_photographs_names_the_folder_that_is_missing(
    there: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    script = ROOT / "studies" / "real_omissions" / "study.py"
    sources = ["--bccd", str(tmp_path), "--txl", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run([sys.executable, str(script), "run", *sources], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no such folder" in done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
