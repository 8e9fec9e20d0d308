"""The gradient is the same however segments are packed, ordered, or spread over ranks: two real processes, float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coordexp.modeling.load import LoadedModel
from coordexp.records import Segment
from support.step_gradients import furthest, load_double, mixed_segments, step
from support.torchrun import torchrun

TESTS = Path(__file__).parents[1]

# Case → wrapper, and the rows of each rank by the segments in them.
CASES = {
    "ddp: halves": ("ddp", [[[0, 1, 2]], [[3, 4, 5]]]),
    "ddp: one segment a row": ("ddp", [[[5], [0], [3]], [[1], [4], [2]]]),
    "ddp: uneven ranks": ("ddp", [[[4, 3], [0], [5, 1]], [[2]]]),
    "fsdp2: halves": ("fsdp2", [[[0, 1, 2]], [[3, 4, 5]]]),
    "fsdp2: shuffled, two rows each": ("fsdp2", [[[5, 2], [0]], [[1], [4, 3]]]),
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_double()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> tuple[float, dict[str, torch.Tensor]]:
    """The step in one process, everything in one row."""
    segments: list[Segment] = mixed_segments(loaded)
    return step(loaded, [segments])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(Path(__file__).with_name("gradient_worker.py"), json.dumps(CASES), folder)
    assert done.returncode == 0, done.output[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one(
    case: str, together: Path, alone: tuple[float, dict[str, torch.Tensor]]
) -> None:
    loss, gradient = alone
    assert json.loads((together / "losses.json").read_text())[case] == pytest.approx(loss, rel=1e-12)
    found = torch.load(together / f"{case}.pt")
    assert len(found) > 50
    assert furthest(found, gradient) < 1e-9
