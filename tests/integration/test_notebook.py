"""The notebook's cells run in order, as a user would run them, and improve the demo's checkpoint."""

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

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
MAX_BYTES = 500_000


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def f1(printed: str) -> tuple[float, float]:
    """Before and after training."""
    (found,) = re.findall(r"^f1 +([\d.]+) -> ([\d.]+)$", printed, re.M)
    return float(found[0]), float(found[1])


def test_stored_outputs_show_pictures_and_an_improvement(cells: list[dict[str, Any]]) -> None:
    outputs = [output for cell in cells for output in cell["outputs"]]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 4 and NOTEBOOK.stat().st_size < MAX_BYTES
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
            image.verify()
    before, after = f1("".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream"))
    assert after > before + 0.5
    assert all(output.get("name") != "stderr" and output["output_type"] != "error" for output in outputs)


def test_the_cells_run_and_improve_the_checkpoint(cells: list[dict[str, Any]], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join("".join(cell["source"]) for cell in cells)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "val 32 images, 56 objects: {'button': 56}" in done.stdout
    before, after = f1(done.stdout)
    assert before < 0.1 and after > 0.5
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.size == (384, 288), "the pixels of the image as given, though the model saw a smaller copy"
    rule = read_card(tmp_path / "outputs" / "stage1").preparation.resize
    assert rule is not None and rule.max_pixels == 128 * 128
