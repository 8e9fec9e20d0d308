"""Descriptions by meaning: equal text first, then aliases, then the nearest category. The encoder's weights are random:
the order is tested, not an encoder's quality. A real encoder is tested if its
folder is in COORDEXP_TEXT_ENCODER (docs/evaluation.md says which was tried)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from coordexp.errors import CheckpointError, MissingDependency
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers
from coordexp.evaluation.renaming import Renaming, load_encoder, nearest_categories
from coordexp.records import GTObject
from support.cli_runs import Cli

WORDS = ("[PAD]", "[UNK]", "red", "car", "sedan", "person", "man", "walking", "cloud")
BOX = (10, 10, 500, 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path / "bert")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(WORDS), intermediate_size=32, **shape)).save_pretrained(path / "bert")
    parts = [Transformer(str(path / "bert")), Pooling(32, "cls"), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(path / "encoder"))
    return path / "encoder"


def answered(truth: list[str], found: list[str]) -> ImageAnswer:
    gt = tuple(GTObject(desc, "bbox_2d", BOX) for desc in truth)
    return ImageAnswer("s", "a.png", 100, 100, gt, tuple(ScoredObject(desc, "bbox_2d", BOX, 0.9) for desc in found))


def test_ties_between_categories_go_to_the_first(folder: Path) -> None:
    # Unknown words are one token, so these two categories have one embedding.
    assert nearest_categories(["car"], ["zebra", "yak"], load_encoder(folder), -1.0) == {"car": "zebra"}
    assert nearest_categories(["car"], ["yak", "zebra"], load_encoder(folder), -1.0) == {"car": "yak"}


def test_the_nearest_category_above_the_threshold(folder: Path) -> None:
    encoder = load_encoder(folder)
    categories, descs = ["car", "person"], ["red car", "man walking", "cloud"]
    rows = encoder.encode([*descs, *categories])  # of length 1, by its last module
    cosine = rows[:3] @ rows[3:].T
    threshold = float(np.sort(cosine.max(axis=1))[1])  # one of the three is below
    expected = {
        desc: categories[row.argmax()] for desc, row in zip(descs, cosine, strict=True) if row.max() >= threshold
    }
    assert nearest_categories(descs, categories, encoder, threshold) == expected and len(expected) == 2
    assert nearest_categories(descs, categories, encoder, 1.01) == {}
    assert nearest_categories(descs, [], encoder, 0.0) == {}


def test_annotated_descriptions_are_kept(folder: Path) -> None:
    encoder = load_encoder(folder)
    (found,) = Renaming(None, encoder, -1.0)([answered(["car", "person"], ["person", "cloud"])])
    assert found.pred[0].desc == "person" and found.pred[1].desc in ("car", "person")
    (of_tile,) = Renaming(None, encoder, -1.0)([answered([], ["cloud"])], {"car"})  # its photograph has annotations
    assert of_tile.pred[0].desc == "car"
    (same,) = Renaming(None, encoder, 1.01)([answered(["car"], ["cloud"])])
    assert same.pred[0].desc == "cloud"


def test_equal_then_alias_then_embedding(folder: Path, tmp_path: Path, cli: Cli) -> None:
    answers = [answered(["car", "person"], ["sedan", "man walking"])]
    write_answers(answers, tmp_path / "predictions.jsonl")
    (tmp_path / "aliases.yaml").write_text("car: [sedan]\nperson: [man walking]\n", encoding="utf-8")

    def f1(*argv: object) -> float:
        return json.loads(cli("evaluate", tmp_path / "predictions.jsonl", "--json", *argv).out)["metrics"]["f1"]

    assert f1() == 0.0
    assert f1("--aliases", tmp_path / "aliases.yaml") == 1.0
    # Aliases take precedence: all of them name annotated categories, so the encoder is not used.
    assert f1("--aliases", tmp_path / "aliases.yaml", "--embedder", folder, "--embedding-threshold", "-1") == 1.0
    assert f1("--embedder", folder, "--embedding-threshold", "-1") > 0.0
    assert f1("--embedder", folder, "--embedding-threshold", "1") == 0.0


@pytest.mark.skipif("COORDEXP_TEXT_ENCODER" not in os.environ, reason="COORDEXP_TEXT_ENCODER names no folder")
def test_a_real_encoder_maps_synonyms() -> None:
    categories = ["person", "car", "dog", "tv", "couch", "motorcycle"]
    descs = ["automobile", "puppy", "television", "sofa", "motorbike", "a car", "cloud", "woman in a red coat"]
    found = nearest_categories(descs, categories, load_encoder(os.environ["COORDEXP_TEXT_ENCODER"]), 0.7)
    assert found == {
        "automobile": "car", "puppy": "dog", "television": "tv", "sofa": "couch", "motorbike": "motorcycle",
        "a car": "car",
    }  # fmt: skip


def test_a_missing_encoder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for missing in ("nowhere", "empty"):
        with pytest.raises(CheckpointError, match=missing):
            load_encoder(tmp_path / missing)


def test_missing_sentence_transformers_names_the_install_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependency, match=r"coordexp\[embedding\]"):
        load_encoder(folder)
