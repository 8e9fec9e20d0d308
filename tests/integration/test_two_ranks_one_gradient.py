"""The gradient is the same however segments are packed, ordered, or spread over ranks: two real processes, float64."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from coordexp import distributed
from coordexp.modeling.load import LoadedModel
from coordexp.records import Segment
from coordexp.targets import count_terms
from support.step_gradients import furthest, gradients, load_double, mixed_segments, row_loss, step
from support.torchrun import torchrun

# Case → wrapper, and the rows of each rank by the segments in them.
CASES = {
    "ddp: halves": ("ddp", [[[0, 1, 2]], [[3, 4, 5]]]),
    "ddp: one segment a row": ("ddp", [[[5], [0], [3]], [[1], [4], [2]]]),
    "ddp: uneven ranks": ("ddp", [[[4, 3], [0], [5, 1]], [[2]]]),
    "fsdp2: halves": ("fsdp2", [[[0, 1, 2]], [[3, 4, 5]]]),
    "fsdp2: shuffled, two rows each": ("fsdp2", [[[5, 2], [0]], [[1], [4, 3]]]),
}


def leave_gradients(folder: Path) -> None:
    loaded = load_double()  # before there are ranks, of which only the first would write the tiny checkpoint
    segments = mixed_segments(loaded)
    dist.init_process_group("gloo")
    me, world = distributed.rank(), distributed.world_size()
    losses = {}
    for name, (wrapper, split) in CASES.items():
        mine = [[segments[index] for index in row] for row in split[me]]
        local = count_terms(segment.target for row in mine for segment in row)
        summed = distributed.all_reduce(tuple(local.values()), "sum")
        totals = {term: int(total) for term, total in zip(local, summed, strict=True)}
        bare = copy.deepcopy(loaded.model)
        model: Any = DistributedDataParallel(bare) if wrapper == "ddp" else sharded(bare)
        total = 0.0
        for number, row in enumerate(mine, start=1):
            # Gradients are exchanged once, with the last row, as in the trainer.
            waits = wrapper == "ddp" and number < len(mine)
            with model.no_sync() if waits else nullcontext():
                loss = row_loss(model, loaded, row, totals)
                (loss * world).backward()
            total += loss.item()
        losses[name] = distributed.all_reduce([total], "sum")[0]
        whole = gradients(bare)  # collective under FSDP
        if me == 0:
            torch.save(whole, folder / f"{name}.pt")
    if me == 0:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


def sharded(model: Any) -> Any:
    """FSDP2 as accelerate applies it: layer by layer, then the rest."""
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
        fully_shard(layer)
    return fully_shard(model)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_double()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> tuple[float, dict[str, torch.Tensor]]:
    segments: list[Segment] = mixed_segments(loaded)
    return step(loaded, [segments])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(leave_gradients, folder)
    assert done.returncode == 0, done.output[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_same_gradient_as_one(
    case: str, together: Path, alone: tuple[float, dict[str, torch.Tensor]]
) -> None:
    loss, gradient = alone
    assert json.loads((together / "losses.json").read_text())[case] == pytest.approx(loss, rel=1e-12)
    found = torch.load(together / f"{case}.pt")
    assert len(found) > 50
    assert furthest(found, gradient) < 1e-9
