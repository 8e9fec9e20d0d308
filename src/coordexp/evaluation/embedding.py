"""Descriptions that no table knows → the annotated category whose meaning is nearest, by a text encoder on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordexp.errors import CheckpointError
from coordexp.evaluation.answers import ImageAnswer

_BATCH = 64
_MAX_TOKENS = 64


class TextEncoder:
    """Sentence embeddings of a transformers checkpoint: the mean of its last hidden states, of length 1.

    Args:
        folder: encoder and tokenizer on disk, e.g. a sentence-transformers model's. Nothing is downloaded.

    Raises:
        CheckpointError: no such folder, or no encoder with a tokenizer in it.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; --embedder must be a text encoder on disk")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}: no text encoder with a tokenizer: {error}") from error

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(N, D) float64, one row of length 1 for each text."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            inputs = self._tokenizer(
                list(texts[start : start + _BATCH]), padding=True, truncation=True, max_length=_MAX_TOKENS,
                return_tensors="pt",
            )  # fmt: skip
            hidden_NLD = self._model(**inputs).last_hidden_state.double()
            mask_NL1 = inputs["attention_mask"][..., None].double()
            mean_ND = (hidden_NLD * mask_NL1).sum(dim=1) / mask_NL1.sum(dim=1)
            parts.append(torch.nn.functional.normalize(mean_ND, dim=-1).numpy())
        return np.concatenate(parts) if parts else np.zeros((0, 0))


def nearest_categories(
    descs: Sequence[str], categories: Sequence[str], encoder: TextEncoder, threshold: float
) -> dict[str, str]:
    """Which of ``descs`` is which category: the one of highest cosine, if that is at least ``threshold``; of equal ones
    the first."""
    if not descs or not categories:
        return {}
    cosine_NC = encoder.embed(descs) @ encoder.embed(categories).T
    best_N = cosine_NC.argmax(axis=1)
    return {
        desc: categories[int(best)]
        for desc, best, row_C in zip(descs, best_N.tolist(), cosine_NC, strict=True)
        if row_C[best] >= threshold
    }


def apply_embedding(answers: Sequence[ImageAnswer], encoder: TextEncoder, threshold: float) -> list[ImageAnswer]:
    """The same answers; predictions whose description is annotated nowhere are renamed to the nearest one that is."""
    categories = sorted({obj.desc for answer in answers for obj in answer.truth})
    unknown = sorted({obj.desc for answer in answers for obj in answer.pred}.difference(categories))
    name_of = nearest_categories(unknown, categories, encoder, threshold)
    return [
        replace(answer, pred=tuple(replace(obj, desc=name_of.get(obj.desc, obj.desc)) for obj in answer.pred))
        for answer in answers
    ]
