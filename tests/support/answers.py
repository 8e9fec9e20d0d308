"""Answers as text, both tokenizers, and the way from an answer to its training target."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from coordexp.coords import TURN_END, CoordVocab, serialize_append
from coordexp.matching import MatchingConfig, match_objects
from coordexp.modeling.tiny import build_tokenizer
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, ImageRecord, Rollout, RolloutRequest
from coordexp.targets import SampleOutcome, TargetPolicy, build_target, count_mixed_kind
from support.qwen_tokenizer import qwen_vocab

MATCHING = MatchingConfig()
CAT = GTObject("black cat", "bbox_2d", (10, 20, 200, 220))
NEAR_CAT = GTObject("cat", "bbox_2d", (12, 25, 195, 230))  # finds CAT
DOG = GTObject("dog", "bbox_2d", (500, 500, 700, 800))
LEAF = GTObject("leaf", "poly", (300, 20, 490, 20, 490, 210))


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@lru_cache(maxsize=1)
def tiny_vocab() -> CoordVocab:
    return CoordVocab.from_tokenizer(tiny_tokenizer())


vocabs = pytest.mark.parametrize("make_vocab", [tiny_vocab, qwen_vocab], ids=lambda make: make.__name__)


def entry(n: int, obj: GTObject = CAT) -> str:
    return serialize_append([obj], "{", n)[:-1]


def answer(*entries: str) -> str:
    return "{" + ", ".join(entries) + "}" + TURN_END


def outcome_of(
    response: str | Sequence[int],
    truth: Sequence[GTObject],
    vocab: CoordVocab,
    matching: MatchingConfig = MATCHING,
    **options: Any,
) -> SampleOutcome:
    ids = tuple(vocab.encode(response) if isinstance(response, str) else response)
    parsed = parse_rollout(ids, vocab)
    match = match_objects(parsed.objects, truth, matching)
    target = build_target(parsed, match, truth, vocab, sample_id="sample", **options)
    text = vocab.decode(i for i in ids if 0 <= i < len(vocab))  # other ids write nothing
    policy = options.get("policy", TargetPolicy())
    rollout = Rollout("sample", (), ids, text, parsed.truncated)
    return SampleOutcome(rollout, parsed, match, target, policy, num_mixed_kind=count_mixed_kind(parsed, match, truth))


class Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written: ordered, duplicates kept."""


def read_json(text: str, bare: str = "") -> Pairs:
    """``text`` as one JSON object; bare coordinate literals are read as strings that begin with ``bare``. Anything else
    raises."""
    values = re.compile(r'("(?:[^"\\]|\\.)*")|(<\|coord_\d+\|>)', re.DOTALL)
    quoted = values.sub(lambda m: m[1] or f'"{bare}{m[2]}"', text)
    root = json.loads(quoted, object_pairs_hook=Pairs, parse_constant=_refuse)
    assert isinstance(root, Pairs)
    return root


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def taught_text(outcome: SampleOutcome, vocab: CoordVocab) -> str:
    """The decoded training target without its stop token."""
    assert outcome.target.token_ids[-1] == vocab.eos_id
    return vocab.decode(outcome.target.token_ids[:-1])


def record(objects: Sequence[GTObject], sample_id: str = "sample", image: Path = Path("none.png")) -> ImageRecord:
    return ImageRecord(sample_id, image, 128, 128, tuple(objects))


def request(of: ImageRecord, prompt: Sequence[int] = (7, 8, 9)) -> RolloutRequest:
    return RolloutRequest(of.sample_id, of.image, (), tuple(prompt))
