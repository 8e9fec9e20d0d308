"""The notebook's cells run in order, as a user would run them, on the demo's checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_the_quickstart_goes_from_images_to_a_drawn_answer(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4 and all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "12 images, 12 objects: {'red circle': 12}" in done.stdout
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.size == (360, 280)  # the photograph's own pixels, though the model was shown a smaller copy
    rule = json.loads((tmp_path / "outputs" / "stage1" / "image_preparation.json").read_text())
    assert rule["resize"]["max_pixels"] == 128 * 128
