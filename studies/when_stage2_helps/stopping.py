"""A control: while decoding, an answer ends only if the model gives its end a probability above a threshold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def stop_threshold(model: Path, threshold: float | None) -> Iterator[None]:
    """Within it, transformers' ``generate`` writes the root's closing brace behind an entry only with a probability of
    at least ``threshold``. None changes nothing. For tokenizers that write that brace as a token of its own, as the
    tiny models' do."""
    if threshold is None:
        yield
        return
    import torch
    from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

    from coordexp.modeling.load import load_vocab

    vocab = load_vocab(model)
    (brace,) = vocab.encode("}")
    ends_entry = torch.tensor([i for i in range(len(vocab)) if vocab.piece(i).endswith("}") and i != brace])

    class Stop(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            hesitant = scores.float().softmax(-1)[:, brace] < threshold
            scores = scores.clone()
            scores[torch.isin(input_ids[:, -1], ends_entry) & hesitant, brace] = -torch.inf
            return scores

    mixin: Any = GenerationMixin
    generate = mixin.generate

    def patient(self: Any, *args: Any, **options: Any) -> Any:
        # First: a processor that samples leaves no probabilities.
        processors = LogitsProcessorList([Stop(), *(options.pop("logits_processor", None) or [])])
        return generate(self, *args, logits_processor=processors, **options)

    mixin.generate = patient
    try:
        yield
    finally:
        mixin.generate = generate
