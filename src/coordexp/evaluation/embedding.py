"""Descriptions that no table knows → the annotated category whose meaning is nearest, by a text encoder on disk.

By hand, because of sentence-transformers only this much is used: transformers loads the encoder, and pooling and
normalising are a line each. Its folders are read as it writes them, and one with other steps is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordexp.errors import CheckpointError
from coordexp.evaluation.answers import ImageAnswer

_BATCH = 64
_MAX_TOKENS = 256
_STEPS = ("Transformer", "Pooling", "Normalize")  # of a sentence-transformers model: what embed() does
_FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


class TextEncoder:
    """Sentence embeddings of a transformers checkpoint: its last hidden states pooled, of length 1.

    Pooled as the folder's ``1_Pooling/config.json`` says (mean or first token), by the mean where it has none. Texts
    are cut after 256 tokens, or what the tokenizer allows.

    Args:
        folder: encoder and tokenizer on disk, e.g. a sentence-transformers model's. Nothing is downloaded.

    Raises:
        CheckpointError: no such folder, no encoder with a tokenizer in it, or one that takes more than this class does.
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
        self._max_tokens = min(_MAX_TOKENS, self._tokenizer.model_max_length)
        self._first_token = _pools_first_token(folder)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(N, D) float64, one row of length 1 for each text."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            inputs = self._tokenizer(
                list(texts[start : start + _BATCH]), padding=True, truncation=True, max_length=self._max_tokens,
                return_tensors="pt",
            )  # fmt: skip
            hidden_NLD = self._model(**inputs).last_hidden_state.double()
            mask_NL1 = inputs["attention_mask"][..., None].double()
            mean_ND = (hidden_NLD * mask_NL1).sum(dim=1) / mask_NL1.sum(dim=1)
            pooled_ND = hidden_NLD[:, 0] if self._first_token else mean_ND
            parts.append(torch.nn.functional.normalize(pooled_ND, dim=-1).numpy())
        return np.concatenate(parts) if parts else np.zeros((0, 0))


def _pools_first_token(folder: Path) -> bool:
    """What the files beside a sentence-transformers model ask for; False (the mean) where there are none."""
    modules = [step["type"].rpartition(".")[2] for step in _read_json(folder / "modules.json", [])]
    if other := [name for name in modules if name not in _STEPS]:
        raise CheckpointError(f"{folder}: modules.json asks for {other[0]}; only {', '.join(_STEPS)} are done here")
    pooling: Mapping[str, Any] = _read_json(folder / "1_Pooling" / "config.json", {})
    mode = pooling.get("pooling_mode")  # since sentence-transformers 6 a name or a list; before, a flag for each way
    ways = [mode] if isinstance(mode, str) else mode or [name for name, flag in _FLAGS.items() if pooling.get(flag)]
    if ways not in ([], ["mean"], ["cls"]):
        raise CheckpointError(f"{folder}: 1_Pooling asks for {' and '.join(ways)}; mean or cls alone are done here")
    return ways == ["cls"]


def _read_json(path: Path, missing: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


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
