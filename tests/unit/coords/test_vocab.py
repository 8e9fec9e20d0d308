"""The coordinate vocabulary of the tiny and of the real Qwen tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from coordexp.coords import COORD_TOKENS, TURN_END, CoordVocab, serialize_append
from coordexp.errors import VocabError
from coordexp.records import GTObject
from support.answers import tiny_tokenizer, tiny_vocab
from support.qwen_tokenizer import qwen_tokenizer, qwen_vocab

both = pytest.mark.parametrize(
    ("make_vocab", "make_tokenizer"), [(tiny_vocab, tiny_tokenizer), (qwen_vocab, qwen_tokenizer)], ids=["tiny", "qwen"]
)
TEXTS = [
    '{"object_1": {"desc": "red circle", "bbox_2d": ["<|coord_0|>", "<|coord_999|>"]}}<|im_end|>',
    "",
    "雪豹 🐆 𓃠 naïve — ﷺ",  # some characters are several tokens
    "tabs\tand\nlines  and   spaces ",
    "<|coord_*|><|coord_1000|><|coord_007|>",
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>",
]


@both
@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_agree_with_the_tokenizer(make_vocab, make_tokenizer, text: str) -> None:
    vocab, tokenizer = make_vocab(), make_tokenizer()
    ids = vocab.encode(text)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert vocab.encode_answer(text) == ids
    assert vocab.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


@both
@settings(max_examples=60)
@given(data=st.data())
def test_decode_agrees_with_the_tokenizer_for_any_ids(make_vocab, make_tokenizer, data) -> None:
    vocab, tokenizer = make_vocab(), make_tokenizer()
    ids = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=12))
    exact = b"".join(vocab.pieces[i] for i in ids)
    assert vocab.decode(ids) == exact.decode("utf-8", errors="replace")
    try:
        text = exact.decode("utf-8")
    except UnicodeDecodeError:
        return  # half characters: decoders differ in how many replacement characters they write
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


@both
def test_bins_and_ids_are_one_to_one(make_vocab, make_tokenizer) -> None:
    vocab, tokenizer = make_vocab(), make_tokenizer()
    assert len(vocab) == len(tokenizer)
    assert list(vocab.coord_token_ids) == tokenizer.convert_tokens_to_ids(list(COORD_TOKENS))
    assert [vocab.bin_of(i) for i in vocab.coord_token_ids] == list(range(1000))
    assert [vocab.piece(i) for i in vocab.coord_token_ids] == [f"<|coord_{k}|>" for k in range(1000)]
    others = set(range(len(vocab))) - set(vocab.coord_token_ids)
    assert all(vocab.bin_of(i) is None for i in others)


@both
def test_control_tokens_exclude_coordinates(make_vocab, make_tokenizer) -> None:
    vocab, tokenizer = make_vocab(), make_tokenizer()
    assert vocab.eos_id == tokenizer.convert_tokens_to_ids(TURN_END)
    known = [token for token in ("<|im_start|>", TURN_END, "<|endoftext|>", "<|vision_start|>", "<|vision_end|>",
                                 "<|image_pad|>", "<|video_pad|>") if token in tokenizer.get_added_vocab()]  # fmt: skip
    assert {TURN_END, "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"} <= set(known)
    assert {vocab.piece(i) for i in vocab.control_ids} - {"<|vision_pad|>"} == set(known)
    wildcard = tokenizer.convert_tokens_to_ids("<|coord_*|>")
    assert wildcard in vocab.reserved_ids - vocab.control_ids
    assert vocab.control_ids < vocab.reserved_ids
    assert vocab.reserved_ids.isdisjoint(vocab.coord_token_ids)


def test_an_id_that_the_tokenizer_lacks_writes_nothing() -> None:
    vocab = qwen_vocab()
    assert vocab.decode([*vocab.encode("cat"), 999_999, -1, *vocab.encode(" dog")]) == "cat dog"


def byte_tokenizer(added: list[str], alphabet: str = "ab") -> PreTrainedTokenizerFast:
    model = models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    tokenizer.add_tokens(added)
    return tokenizer


@pytest.mark.parametrize(
    ("added", "alphabet", "named"),
    [
        ([TURN_END], "ab", r"<\|coord_0\|>.*expand-vocab"),
        ([TURN_END, *COORD_TOKENS[:-1]], "ab", r"<\|coord_999\|>"),
        ([*COORD_TOKENS], "ab", r"<\|im_end\|>"),
        ([TURN_END, *COORD_TOKENS], "a▁", "▁"),
    ],
)
def test_unusable_tokenizer_is_refused(added: list[str], alphabet: str, named: str) -> None:
    with pytest.raises(VocabError, match=named):
        CoordVocab.from_tokenizer(byte_tokenizer(added, alphabet))


DESCS = st.text(
    st.one_of(st.sampled_from("ab .,!?<>|\"\\\u0338\u0301\u200d龘🐆"), st.characters(exclude_categories=["Cs", "Cc"])),
    min_size=1, max_size=8,
)  # fmt: skip
SHAPES = st.one_of(
    st.tuples(*[st.integers(0, 999)] * 4).map(lambda b: ("bbox_2d", b)),
    st.tuples(*[st.integers(0, 999)] * 6).map(lambda b: ("poly", b)),
)
SCENES = st.lists(st.builds(lambda desc, shape: GTObject(desc, *shape), DESCS, SHAPES), max_size=5)


@both
@settings(max_examples=80)
@given(scene=SCENES, order=st.sampled_from(["desc_first", "geometry_first"]), start=st.integers(1, 2000))
def test_encode_answer_agrees_with_the_tokenizer(make_vocab, make_tokenizer, scene, order, start):
    vocab, tokenizer = make_vocab(), make_tokenizer()
    for prefix in ("{", '{"object_1": {}'):
        text = serialize_append(scene, prefix, start, order)
        assert vocab.encode_answer(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_encode_answer_after_its_cache_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordexp.coords._MAX_REMEMBERED", 5)
    vocab = CoordVocab.from_tokenizer(tiny_tokenizer())
    for n in range(1, 30):
        text = serialize_append([GTObject(f"cat {n}", "bbox_2d", (1, 2, 3, n))] * 2, "{", n)
        assert vocab.encode_answer(text) == vocab.encode(text)


def test_tokenizer_that_glues_coordinates_encodes_the_whole_text() -> None:
    class Gluing:
        """Encodes a coordinate and the following quote as one token, which added tokens never do."""

        def __getattr__(self, name: str):
            return getattr(tiny_tokenizer(), name)

        def __len__(self) -> int:
            return len(tiny_tokenizer())

        def __call__(self, text, add_special_tokens: bool):
            if isinstance(text, list):
                return {"input_ids": [self(part, add_special_tokens)["input_ids"] for part in text]}
            quote, wide = tiny_tokenizer().get_vocab()['"'], tiny_tokenizer().get_vocab()["<|endoftext|>"]
            ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
            coords = set(tiny_vocab().coord_token_ids)
            return {"input_ids": [wide if t == quote and i and ids[i - 1] in coords else t for i, t in enumerate(ids)]}

    vocab = CoordVocab.from_tokenizer(Gluing())
    text = '["<|coord_1|>"]'
    assert vocab.encode_answer(text) == vocab.encode(text) != tiny_vocab().encode(text)
