"""The gradient is the same however segments are packed, ordered, or spread over ranks: two real processes, float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from coordexp import distributed
from coordexp.config.objective import PipelineConfig
from coordexp.matching import match_objects
from coordexp.modeling.load import LoadedModel
from coordexp.objective import RowObjective, build_pipeline
from coordexp.parsing import parse_rollout
from coordexp.records import Segment
from coordexp.targets import build_target, count_terms
from coordexp.training.rows import RowBuilder
from support.config_samples import pipeline
from support.tiny_run import gt_segments, load_tiny, nearly_right, row_of, tiny_samples
from support.torchrun import torchrun
from support.tuned_models import untied_checkpoint

PIPELINE = build_pipeline(PipelineConfig.model_validate(pipeline()), channel="B")


def load_double(checkpoint: Path | None = None) -> LoadedModel:
    """The tiny model, or that of ``checkpoint``, sharpened, in float64; the same in every process."""
    loaded = load_tiny(sharpen=2.0, checkpoint=checkpoint)
    loaded.model.double()
    return loaded


def mixed_segments(loaded: LoadedModel) -> list[Segment]:
    """Three answers written from ground truth, and three of the model's own with something found and missed."""
    found = []
    for sample in tiny_samples(loaded, 6)[3:]:
        record, vocab = sample.record, loaded.vocab
        parsed = parse_rollout(vocab.encode(nearly_right(record.objects)), vocab)
        match = match_objects(parsed.objects, record.objects)
        target = build_target(parsed, match, record.objects, vocab, sample_id=record.sample_id)
        found.append(Segment(record.sample_id, sample.request.prompt_token_ids, target, sample.request.model_inputs))
    assert sum(len(segment.target.matched_pred_idx) for segment in found) > 0
    return [*gt_segments(loaded, 3), *found]


def row_loss(
    model: Any, loaded: LoadedModel, row_segments: Sequence[Segment], totals: Mapping[str, int]
) -> torch.Tensor:
    """One row's share of the loss. ``model``: the bare model, or what DDP or FSDP made of it."""
    objective = RowObjective(PIPELINE, loaded.vocab.coord_token_ids)
    row = RowBuilder.from_model(loaded, torch.device("cpu"))(row_of(row_segments), objective)
    scores = model(forward_fn=partial(objective.scores, row=row))
    return objective.result(row.supervision, scores, totals).loss


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of every weight; whole even if it is sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    return found


def step(loaded: LoadedModel, micro_steps: Sequence[Sequence[Segment]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of an optimizer step with these rows, in this process alone."""
    loaded.model.zero_grad()
    totals = count_terms(segment.target for row in micro_steps for segment in row)
    total = 0.0
    for row in micro_steps:
        loss = row_loss(loaded.model, loaded, row, totals)
        loss.backward()
        total += loss.item()
    return total, gradients(loaded.model)


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    scale = max(value.abs().max().item() for value in b.values())
    return max((a[name] - value).abs().max().item() for name, value in b.items()) / scale


# -- on one rank and on two --------------------------------------------------------------------------------------------

# Case → wrapper, and the rows of each rank by the segments in them.
CASES = {
    "ddp: halves": ("ddp", [[[0, 1, 2]], [[3, 4, 5]]]),
    "ddp: one segment a row": ("ddp", [[[5], [0], [3]], [[1], [4], [2]]]),
    "ddp: uneven ranks": ("ddp", [[[4, 3], [0], [5, 1]], [[2]]]),
    "fsdp2: halves": ("fsdp2", [[[0, 1, 2]], [[3, 4, 5]]]),
    "fsdp2: shuffled, two rows each": ("fsdp2", [[[5, 2], [0]], [[1], [4, 3]]]),
}
UNTIED = {f"{wrapper}: untied head": (wrapper, [[[0, 1, 2]], [[3, 4, 5]]]) for wrapper in ("ddp", "fsdp2")}


def leave_gradients(folder: Path) -> None:
    # Before there are ranks, of which only the first would write the tiny checkpoints.
    tied, untied = load_double(), load_double(untied_checkpoint())
    segments = mixed_segments(tied)
    dist.init_process_group("gloo")
    me, world = distributed.rank(), distributed.world_size()
    losses = {}
    for name, (wrapper, split) in (CASES | UNTIED).items():
        loaded = untied if name in UNTIED else tied
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


@pytest.mark.parametrize("case", ["halves", "untied head"])
def test_fsdp2_and_ddp_have_the_same_gradient_bit_for_bit(case: str, together: Path) -> None:
    """With a row per rank and step; with more, FSDP2 adds up ranks before rows, and DDP rows before ranks."""
    by_ddp, by_fsdp2 = (torch.load(together / f"{wrapper}: {case}.pt") for wrapper in ("ddp", "fsdp2"))
    assert ("lm_head.weight" in by_ddp) == (case == "untied head")
    assert by_ddp.keys() == by_fsdp2.keys()
    assert [name for name in by_ddp if not torch.equal(by_ddp[name], by_fsdp2[name])] == []
