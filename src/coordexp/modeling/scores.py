"""A score for each object of an answer, from the model's own token probabilities.

    score = exp( 0.7 · mean_j log P(bin_j ± 2)  +  0.3 · mean_i log P(desc token_i) )

j runs over the object's coordinate tokens, i over the tokens of its description. A coordinate counts the probability of
its bin and of two bins to either side: training spreads every coordinate over its neighbours, so that even a perfect
model gives the exact bin a fifth. Probabilities are over the full vocabulary at temperature 1, from one forward pass
over prompt and answer: however the answer was decoded, and by whichever engine, it is scored in the same way.

The score ranks objects. Confidence estimates the probability that the object is there and has this name:

    confidence = exp( mean_j log P(bin_j ± 32)  +  sum_i log P(desc token_i) )

Its coordinates may differ by a thirtieth of the image's side, the scale of training's blur and of annotators'
disagreement; its description may not differ. A checkpoint's calibration, if there is one, is applied to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordexp.checkpoints.card import Calibration
from coordexp.coords import CoordVocab
from coordexp.errors import broken_logits
from coordexp.records import NUM_BINS, ParsedRollout, Rollout, RolloutRequest
from coordexp.sharding import forward_passes, missing_calls, smallest_prompt

COORD_WEIGHT = 0.7
NEIGHBOURS = 2  # bins to either side that count as the same coordinate
WIDE_NEIGHBOURS = 32  # the same for confidence


@dataclass(frozen=True, slots=True)
class ObjectScore:
    """Both in 0..1."""

    score: float
    confidence: float


def logits_of_answer(
    model: Any, image_token_id: int, request: RolloutRequest, answer: Sequence[int], keep: torch.Tensor | int
) -> torch.Tensor:
    """Logits (N, V) of one forward over a request's prompt and ``answer``, at the N positions ``keep``, or its last."""
    device = next(model.parameters()).device
    ids_1L = torch.tensor([[*request.prompt_token_ids, *answer]], device=device)
    return model(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        mm_token_type_ids=(ids_1L == image_token_id).int(),
        pixel_values=request.model_inputs["pixel_values"].to(device),
        image_grid_thw=request.model_inputs["image_grid_thw"].to(device),
        logits_to_keep=keep,
        use_cache=False,
    ).logits[0]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScorer:
    """Scores answers with a model that is in this process. ``calibration``: of confidences; None leaves them raw.
    ``trains``: whether a run is training the model."""

    model: Any
    vocab: CoordVocab
    image_token_id: int
    calibration: Calibration | None = None
    trains: bool = False

    @torch.no_grad()
    def score(
        self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout], parsed: Sequence[ParsedRollout]
    ) -> list[tuple[ObjectScore, ...]]:
        """The scores of each answer, one per object. The model keeps its train or eval mode. A collective call if the
        model is sharded. Raises CheckpointError or, for a model in training, TrainingDiverged if it computes NaN."""
        missing = missing_calls(self.model, sum(len(one.objects) > 0 for one in parsed))
        was_training = self.model.training
        self.model.eval()
        try:
            with forward_passes(self.model):
                scores = [self._score(*answer) for answer in zip(requests, rollouts, parsed, strict=True)]
                for _ in range(missing):
                    self.model(**smallest_prompt(self.model), logits_to_keep=1, use_cache=False)
        finally:
            self.model.train(was_training)
        return scores

    def _score(self, request: RolloutRequest, rollout: Rollout, parsed: ParsedRollout) -> tuple[ObjectScore, ...]:
        if not parsed.objects:
            return ()
        response_ids = rollout.response_token_ids
        positions = sorted(
            {at for obj in parsed.objects for at in (*obj.coord_token_idx, *range(*obj.desc_token_span))}
        )
        device = next(self.model.parameters()).device
        position_N = torch.tensor(positions, device=device) + len(request.prompt_token_ids)
        # Tokens after the last object cannot change its score, and may be placeholders of an image that is not there.
        read = response_ids[: positions[-1]]
        logits_NV = logits_of_answer(self.model, self.image_token_id, request, read, position_N - 1)
        log_all_N = torch.logsumexp(logits_NV.float(), dim=-1)
        if not bool(log_all_N.isfinite().all()):
            raise broken_logits(self.model.name_or_path, int(self.trains))
        # Log probability of the token at a position; for a coordinate, of its near and of its wide neighbourhood.
        near: dict[int, float] = {}
        wide: dict[int, float] = {}
        coord_ids_B = torch.tensor(self.vocab.coord_token_ids, device=device)
        for row, at in enumerate(positions):
            token_id = int(response_ids[at])
            k = self.vocab.bin_of(token_id)
            for log_p, width in ((near, NEIGHBOURS), (wide, WIDE_NEIGHBOURS)):
                ids = coord_ids_B[max(0, k - width) : min(NUM_BINS, k + width + 1)] if k is not None else [token_id]
                log_p[at] = float(torch.logsumexp(logits_NV[row, ids].float(), dim=-1) - log_all_N[row])
        scores = []
        for obj in parsed.objects:
            coords, desc = obj.coord_token_idx, [near[at] for at in range(*obj.desc_token_span)]
            mean_near, mean_wide = (sum(log_p[at] for at in coords) / len(coords) for log_p in (near, wide))
            score = math.exp(min(0.0, COORD_WEIGHT * mean_near + (1 - COORD_WEIGHT) * sum(desc) / len(desc)))
            raw = math.exp(min(0.0, mean_wide + sum(desc)))
            scores.append(ObjectScore(score, raw if self.calibration is None else self.calibration(raw)))
        return tuple(scores)
