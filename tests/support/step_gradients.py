"""An optimizer step's loss and gradient, computed as the trainer computes them, in float64 with a real model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

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

PIPELINE = build_pipeline(PipelineConfig.model_validate(pipeline()), channel="B")


def load_double(attention: str = "packed") -> LoadedModel:
    """The tiny model, sharpened, in float64; the same in every process."""
    loaded = load_tiny(attention=attention, sharpen=2.0)
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
    row = RowBuilder.from_model(loaded, torch.device("cpu"), torch.float64)(row_of(row_segments), objective)
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
