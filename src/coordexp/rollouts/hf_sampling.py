"""Sampling inside transformers' ``generate``: every sequence draws from a random stream of its own.

``generate`` itself draws for a whole batch from one stream, so that an answer would change with the batch it stands in:
with ``decode_batch_size``, with the number of processes, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from coordexp.rollouts.backend import DecodingOptions


class RowSampler(LogitsProcessor):
    """Draws each row's next token and leaves no other possible. Made anew for each call of ``generate``, which runs
    greedily behind it; last in its list of processors."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """``seeds``: one a row."""
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probabilities = scores.float().softmax(-1)
        drawn = [
            torch.multinomial(row, 1, generator=stream)
            for row, stream in zip(probabilities, self._streams, strict=True)
        ]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)


def sampling_processors(options: DecodingOptions, seeds: Sequence[int], device: torch.device) -> list[LogitsProcessor]:
    """What makes greedy ``generate`` sample as ``options`` say, in the order in which transformers itself applies
    them; nothing for temperature 0."""
    if options.temperature <= 0:
        return []
    processors: list[LogitsProcessor] = []
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    return [*processors, RowSampler(seeds, device)]
