"""Add the 1000 coordinate tokens to a Qwen3-VL checkpoint: tokenizer, embedding rows, language head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from coordexp.checkpoints.card import read_card
from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.folder import Checkpoint
from coordexp.coords import COORD_TOKENS, CoordVocab
from coordexp.errors import CheckpointError
from coordexp.modeling.load import load_processor, read_config, read_weights, write_checkpoint
from coordexp.records import NUM_BINS

WILDCARD = "<|coord_*|>"  # "some coordinate" in prompts and documentation; never written by the model
NEW_TOKENS = (WILDCARD, *COORD_TOKENS)
_ROWS_AT_ONCE = 8192  # statistics in float32 over slices: a second copy of a large vocabulary would not fit


@torch.no_grad()
def expand_vocab(checkpoint: Path, output: Path) -> None:
    """Write ``checkpoint``, with the coordinate tokens added after its own, to the new folder ``output``.

    The tokens are special tokens, in the order ``<|coord_*|>``, ``<|coord_0|>`` … ``<|coord_999|>``. Their rows start
    at the mean of the rows in use, plus a smooth code of the bin with the same standard deviation, so that they begin
    distinct and ordered. Rows of existing tokens keep their values, and tied heads stay tied.

    Raises:
        CheckpointError: ``output`` is not empty, ``checkpoint`` is not a complete Qwen3-VL checkpoint, it has the
            tokens already, or resizing changed whether its head is tied.
    """
    from tokenizers import AddedToken

    checkpoint, output = Path(checkpoint), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: exists already and is not an empty folder; name a new one")
    opened = Checkpoint.open(checkpoint)
    weight_shapes(opened)  # raises for missing and damaged weights, before transformers takes minutes to load others
    rows = read_config(opened).text_config.vocab_size
    processor = load_processor(opened)
    tokenizer = processor.tokenizer
    known = tokenizer.get_vocab()
    added = [token for token in NEW_TOKENS if token not in known]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in added], special_tokens=True)
    ids = dict(zip(NEW_TOKENS, tokenizer.convert_tokens_to_ids(list(NEW_TOKENS)), strict=True))
    # If the tokenizer has coordinate tokens but the model lacks rows for some, none of them was trained.
    rowless = any(row >= rows for token, row in ids.items() if token not in added)
    fresh = ids if rowless else {token: ids[token] for token in added}
    if not fresh:
        raise CheckpointError(f"{checkpoint}: has all 1000 coordinate tokens already; nothing to do")
    CoordVocab.from_tokenizer(tokenizer)  # raises for tokenizers that training would refuse
    model = read_weights(opened, "auto")
    tied = _is_tied(model)
    if len(tokenizer) > rows:
        # mean_resizing would estimate a covariance of the whole vocabulary, only to be overwritten below.
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generator, bins = torch.Generator().manual_seed(0), {token: k for k, token in enumerate(COORD_TOKENS)}
    for layer in [model.get_input_embeddings(), *([] if tied else [model.lm_head])]:
        matrix_VH = layer.get_parameter("weight")
        # Rows after the tokenizer's last token are untrained padding: statistics use those before the first new one.
        used_VH = matrix_VH[: min(fresh.values())]
        slices = used_VH.split(_ROWS_AT_ONCE)
        mean_H = torch.stack([part.float().sum(0) for part in slices]).sum(0) / len(used_VH)
        squares = sum((part.float() - mean_H).square().sum().item() for part in slices)
        code_BH = smooth_coord_rows(matrix_VH.shape[1], math.sqrt(squares / used_VH.numel()), generator)
        for token, row in fresh.items():
            value_H = mean_H + code_BH[bins[token]] if token in bins else mean_H
            matrix_VH[row] = value_H.to(matrix_VH.dtype)
    if _is_tied(model) != tied:
        raise CheckpointError(
            f"{checkpoint}: resizing {'untied the language head from' if tied else 'tied the language head to'} the "
            "embeddings; nothing was written. Please report this with the checkpoint's config.json"
        )
    write_checkpoint(model, processor, read_card(checkpoint), output)


def smooth_coord_rows(hidden: int, std: float, generator: torch.Generator) -> torch.Tensor:
    """Rows (1000, hidden), float32, of standard deviation about ``std``: random cosines of the bin, half a cycle to 60.

    Raising the logit of one bin then raises those next to it. With independent random rows a model has to learn the
    number line token by token.
    """
    log_low, log_high = math.log(0.5), math.log(60.0)
    cycles_H = torch.exp(log_low + (log_high - log_low) * torch.rand(hidden, generator=generator))
    phase_H = 2 * math.pi * torch.rand(hidden, generator=generator)
    position_B1 = torch.arange(NUM_BINS, dtype=torch.float32)[:, None] / (NUM_BINS - 1)
    return std * math.sqrt(2) * torch.cos(2 * math.pi * cycles_H * position_B1 + phase_H)


def _is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.get_input_embeddings().weight
