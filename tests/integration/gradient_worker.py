"""One of two processes that compute optimizer steps together, under DDP and under FSDP2, and leave the gradients."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from coordexp import distributed
from coordexp.targets import count_terms
from support.step_gradients import gradients, load_double, mixed_segments, row_loss


def main(cases: str, folder: str) -> None:
    loaded = load_double()  # before there are ranks: of several, only the first would write the tiny checkpoint
    segments = mixed_segments(loaded)
    dist.init_process_group("gloo")
    me, world = distributed.rank(), distributed.world_size()
    losses = {}
    for name, (wrapper, split) in json.loads(cases).items():
        mine = [[segments[index] for index in row] for row in split[me]]
        local = count_terms(segment.target for row in mine for segment in row)
        summed = distributed.all_reduce(tuple(local.values()), "sum")
        totals = {term: int(total) for term, total in zip(local, summed, strict=True)}
        bare = copy.deepcopy(loaded.model)
        model: Any = DistributedDataParallel(bare) if wrapper == "ddp" else sharded(bare)
        total = 0.0
        for number, row in enumerate(mine, start=1):
            # Gradients are exchanged once, behind the last row, as the trainer does.
            waits = wrapper == "ddp" and number < len(mine)
            with model.no_sync() if waits else nullcontext():
                loss = row_loss(model, loaded, row, totals)
                (loss * world).backward()
            total += loss.item()
        losses[name] = distributed.all_reduce([total], "sum")[0]
        whole = gradients(bare)  # collective under FSDP
        if me == 0:
            torch.save(whole, Path(folder) / f"{name}.pt")
    if me == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


def sharded(model: Any) -> Any:
    """FSDP2 as accelerate applies it: layer by layer, then the rest."""
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
        fully_shard(layer)
    return fully_shard(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
