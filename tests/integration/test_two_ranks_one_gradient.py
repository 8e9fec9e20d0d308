"""The gradient is the same however segments are packed, ordered, or spread over ranks: the trainer's own step in two
real processes, in float64, against a step that is written out here."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerState

from coordexp import distributed
from coordexp.config.objective import PipelineConfig
from coordexp.coords import TURN_END
from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig, match_objects
from coordexp.modeling.load import LoadedModel
from coordexp.objective import RowObjective, build_pipeline
from coordexp.parsing import parse_rollout
from coordexp.recording.writer import RolloutLog
from coordexp.records import Segment
from coordexp.targets import TargetPolicy, TransportConfig, build_target, count_terms
from coordexp.training.batches import MicroBatches
from coordexp.training.rows import RowBuilder, RowPlanner
from coordexp.training.state import RunState
from coordexp.training.step import Task, TrainStep
from coordexp.training.step_answers import AnswerReader, RolloutQueue, TargetOptions
from support.config_samples import pipeline
from support.tiny_run import InMemoryBackend, load_tiny, nearly_right, row_of, tiny_samples
from support.torchrun import torchrun
from support.tuned_models import untied_checkpoint

PIPELINE = build_pipeline(PipelineConfig.model_validate(pipeline()), channel="B")


def load_double(checkpoint: Path | None = None) -> LoadedModel:
    """The tiny model, or that of ``checkpoint``, sharpened, in float64; the same in every process."""
    loaded = load_tiny(sharpen=2.0, checkpoint=checkpoint)
    loaded.model.double()
    return loaded


def answer_of(samples: Sequence[Sample], sample_id: str) -> str:
    """The first three samples' answers have no object, the others all but their last, each a little off."""
    place = [sample.record.sample_id for sample in samples].index(sample_id)
    return "{}" + TURN_END if place < 3 else nearly_right(samples[place].record.objects)


def mixed_segments(loaded: LoadedModel) -> list[Segment]:
    """Three answers to which everything is appended, and three in which something is found and missed."""
    samples, found = tiny_samples(loaded, 6), []
    for sample in samples:
        record, vocab = sample.record, loaded.vocab
        parsed = parse_rollout(vocab.encode(answer_of(samples, record.sample_id)), vocab)
        match = match_objects(parsed.objects, record.objects)
        target = build_target(parsed, match, record.objects, vocab, sample_id=record.sample_id)
        found.append(Segment(record.sample_id, sample.request.prompt_token_ids, target, sample.request.model_inputs))
    matched = [len(segment.target.matched_pred_idx) for segment in found]
    assert sum(matched[:3]) == 0 < sum(matched[3:])
    return found


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of every weight; whole even if it is sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    return found


def by_hand(loaded: LoadedModel, segments: Sequence[Segment]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of an optimizer step with one row of all segments, written out here."""
    loaded.model.zero_grad()
    objective = RowObjective(PIPELINE, loaded.vocab.coord_token_ids)
    row = RowBuilder.from_model(loaded, torch.device("cpu"))(row_of(segments), objective)
    scores = loaded.model(forward_fn=partial(objective.scores, row=row))
    loss = objective.result(row.supervision, scores, count_terms(segment.target for segment in segments)).loss
    loss.backward()
    return loss.item(), gradients(loaded.model)


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


class Rows:
    """Stands for StepBatches: micro-batches of a single step."""

    def __init__(self, batches: MicroBatches) -> None:
        self.batches = batches

    def take(self) -> MicroBatches:
        return self.batches


def product_step(
    loaded: LoadedModel, model: Any, accelerator: Accelerator, rows: Sequence[Sequence[int]], folder: Path
) -> float:
    """Run the trainer's own step on this rank's samples, a micro-batch for each row. Returns the step's loss, over all
    ranks; the gradient is in the model."""
    samples, vocab = tiny_samples(loaded, 6), loaded.vocab
    backend = InMemoryBackend(vocab, lambda request: answer_of(samples, request.sample_id))
    task = Task(
        RowObjective(PIPELINE, vocab.coord_token_ids),
        RowPlanner(None, capacity=None),
        TargetOptions(vocab, "desc_first", TransportConfig(), TargetPolicy()),
        RolloutQueue(backend, AnswerReader(vocab, MatchingConfig()), 3),
    )
    run = RunState(loaded, model, None, None, accelerator, TrainerState())
    step = TrainStep(
        run,
        {None: task},
        None,
        build_row=RowBuilder.from_model(loaded, torch.device("cpu")),
        max_grad_norm=0.0,
        rollout_log=RolloutLog(folder, distributed.rank()),
    )
    batches: Any = Rows([[samples[index] for index in row] for row in rows])
    step.accumulate(batches, 0)
    return run.sums.take()["loss"]


def leave_gradients(folder: Path) -> None:
    # Before there are ranks, of which only the first would write the tiny checkpoints.
    tied, untied = load_double(), load_double(untied_checkpoint())
    dist.init_process_group("gloo")
    me = distributed.rank()
    accelerator, losses = Accelerator(cpu=True), {}
    for name, (wrapper, split) in (CASES | UNTIED).items():
        loaded = untied if name in UNTIED else tied
        bare = copy.deepcopy(loaded.model)
        model: Any = DistributedDataParallel(bare) if wrapper == "ddp" else sharded(bare)
        accelerator.state.fsdp_plugin = None if wrapper == "ddp" else object()  # by which a run knows that it shards
        losses[name] = product_step(replace(loaded, model=bare), model, accelerator, split[me], folder / name)
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
    return by_hand(loaded, mixed_segments(loaded))


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
