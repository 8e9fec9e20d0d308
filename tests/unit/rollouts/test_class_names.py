"""Constrained decoding: every label can be written in any tokens, and no other description can."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import ConfigError, DataError
from coordexp.inference.session import read_class_names
from coordexp.modeling.load import load_vocab
from coordexp.records import GTObject
from coordexp.rollouts.class_names import START, ClassNames, ScanState
from coordexp.rollouts.hf import BatchClassNamesProcessor

NAMES = ("red circle", "red square", "re", 'a "q"', "été 猫")
BOX = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def vocab() -> CoordVocab:
    return load_vocab(asset("checkpoints/demo-stage1"))


@pytest.fixture(scope="module")
def rule(vocab: CoordVocab) -> ClassNames:
    return ClassNames(NAMES, vocab.pieces, vocab.eos_id)


def answer(*descs: str) -> str:
    return serialize_objects([GTObject(desc, "bbox_2d", BOX) for desc in descs])


def in_bytes(text: str, vocab: CoordVocab) -> list[int]:
    """The same text in the smallest tokens that there are."""
    of_byte = {piece: token_id for token_id, piece in enumerate(vocab.pieces) if len(piece) == 1}
    return [of_byte[bytes([byte])] for byte in text.encode()]


def any_cut(text: str, vocab: CoordVocab, rng: random.Random) -> list[int]:
    """The same text cut into tokens at random."""
    data, ids = text.encode(), []
    of_piece = {piece: token_id for token_id, piece in enumerate(vocab.pieces) if piece}
    while data:
        fitting = [data[:n] for n in range(1, 16) if data[:n] in of_piece]
        piece = rng.choice(fitting)
        ids.append(of_piece[piece])
        data = data[len(piece) :]
    return ids


def first_mistake(answer: Sequence[int], rule: ClassNames) -> int | None:
    """The position of the first token of an answer that the rule forbids; None where there is none."""
    state: ScanState | None = START
    for at, token_id in enumerate(answer):
        state = rule.after(state, token_id)
        if state is None:
            return at
    return None


def test_class_name_can_be_written_in_any_tokens(rule: ClassNames, vocab: CoordVocab) -> None:
    text, rng = answer(*NAMES), random.Random(0)
    for ids in (vocab.encode(text), in_bytes(text, vocab), *(any_cut(text, vocab, rng) for _ in range(30))):
        assert first_mistake([*ids, vocab.eos_id], rule) is None


@pytest.mark.parametrize("desc", ["aee", "red", "red circles", "red circle ", "Red circle", " re", "blue", "été"])
def test_other_description_is_refused_in_any_tokens(rule: ClassNames, vocab: CoordVocab, desc: str) -> None:
    text, rng = answer("re", desc), random.Random(0)
    for ids in (vocab.encode(text), in_bytes(text, vocab), *(any_cut(text, vocab, rng) for _ in range(30))):
        at = first_mistake(ids, rule)
        assert at is not None
        assert vocab.decode(ids[:at]).count('"desc"') <= 2 and answer("re")[:-1] in vocab.decode(ids[: at + 1])


@pytest.mark.parametrize(
    "text", ['{"object_1": {"desc": 5', '{"desc": ["re"]', '{"desc": null', '{"desc": "red circle', '{"desc" : "aee"']
)
def test_description_must_be_a_finished_string(rule: ClassNames, vocab: CoordVocab, text: str) -> None:
    assert first_mistake([*in_bytes(text, vocab), vocab.eos_id], rule) is not None


@pytest.mark.parametrize(
    "text",
    ['{"describe": "aee"}', '{"x": "desc", "y": "aee"}', '{"a\\"desc": "aee"}', '["desc", "aee"]', "prose: aee",
     '{"de": "aee"}', '{"xcdesc": "aee"}', '{"\\"\\"desc": "aee"}'],
)  # fmt: skip
def test_other_text_is_not_constrained(rule: ClassNames, vocab: CoordVocab, text: str) -> None:
    assert first_mistake([*in_bytes(text, vocab), vocab.eos_id], rule) is None


def test_a_token_that_ends_a_label_may_not_begin_another_description() -> None:
    pieces = [b'"', b'"}, {"desc": "re', b'"}, {"desc": "aee', b'"}', b"", b"<eos>"]
    rule, state = ClassNames(["re"], pieces, 5), ScanState("name", 0)
    for byte in (b"r", b"e"):
        state = ClassNames(["re"], [byte], 9).after(state, 0)
        assert state is not None
    assert rule.next_tokens(state).ids.tolist() == [0, 1, 3]
    assert [token for token in range(7) if rule.after(state, token) is not None] == [0, 1, 3]
    assert rule.after(START, 4) == START, "a token that writes nothing is refused in descriptions alone"


def test_mask_agrees_with_walking_each_token(rule: ClassNames, vocab: CoordVocab) -> None:
    """In every state that an answer passes through, and for every token of the vocabulary."""
    states = {START, ScanState("name", 0)}
    state: ScanState | None = START
    for token_id in in_bytes(answer(*NAMES), vocab):
        assert state is not None
        state = rule.after(state, token_id)
        assert state is not None
        states.add(state)
    assert {one.kind for one in states} == {"out", "text", "key", "colon", "name"}
    for one in states:
        found = rule.next_tokens(one)
        by_walking = {t for t in range(len(vocab)) if rule.after(one, t) is not None}
        if one.kind == "colon":
            by_walking -= {vocab.eos_id}
        ids = set(found.ids.tolist())
        assert (ids if found.are_allowed else set(range(len(vocab))) - ids) == by_walking


def test_finished_rows_are_not_masked(rule: ClassNames, vocab: CoordVocab) -> None:
    open_name = in_bytes('{"desc": "re', vocab)
    ended = [*in_bytes("{}", vocab), *[vocab.eos_id] * (len(open_name) - 2)]
    processor = BatchClassNamesProcessor(rule, vocab.eos_id, 3)
    masked = torch.empty(0)
    for length in range(len(open_name) + 1):
        rows = torch.tensor([[1, 1, 1, *open_name[:length]], [1, 1, 1, *ended[:length]]])
        masked = processor(rows, torch.zeros(2, len(vocab) + 5))
    named, free = torch.isfinite(masked)
    assert free.all()
    allowed = {vocab.piece(int(t)) for t in named.nonzero()}
    assert {'"', "d"} <= allowed and not any(piece[0] not in '"d' for piece in allowed)


def test_empty_class_names_are_refused(vocab: CoordVocab) -> None:
    for names in ([], ["cat", " "]):
        with pytest.raises(ConfigError, match="class names"):
            ClassNames(names, vocab.pieces, vocab.eos_id)


def test_class_names_are_read_from_text_file_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("cat\n\n red car \n")
    data = write_scenes(tmp_path, 6, SPARSE, 3)
    assert read_class_names(None, tmp_path) == ()
    named = read_class_names("cat, red car", tmp_path)
    assert named == read_class_names(str(tmp_path / "n.txt"), tmp_path) == ("cat", "red car")
    assert "red circle" in read_class_names(str(data), tmp_path)
    (tmp_path / "twice.txt").write_text("cat\ndog\ncat\n")
    with pytest.raises(DataError, match="'cat' is name 0 and name 2"):
        read_class_names(str(tmp_path / "twice.txt"), tmp_path)
    for given, error in (("cat,,dog", ConfigError), ("a<|im_end|>", ConfigError), (str(tmp_path / "x.txt"), DataError)):
        with pytest.raises(error):
            read_class_names(given, tmp_path)
