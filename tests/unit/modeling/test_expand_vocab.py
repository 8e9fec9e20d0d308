"""Coordinate tokens in a checkpoint that had none: everything old stays, everything new is distinct and ordered."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from coordexp.checkpoints.describe import describe
from coordexp.coords import COORD_TOKENS
from coordexp.errors import CheckpointError, VocabError
from coordexp.modeling.expand_vocab import NEW_TOKENS, expand_vocab
from coordexp.modeling.load import AutoTokenizer, LoadedModel, load_model, load_vocab
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from support.cli_runs import SMALL

PADDING_ROWS = 300  # Qwen's checkpoints have more rows than tokens; 300 is less than the 1001 that are added


@dataclass(frozen=True)
class Expanded:
    old: Qwen3VLForConditionalGeneration
    new: LoadedModel
    num_old_tokens: int
    tied: bool
    folder: Path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without coordinate tokens. Use a copy."""
    folder = tmp_path_factory.mktemp("plain") / "old"
    return build_tiny_checkpoint(folder, spec=TinySpec(**SMALL), coord_tokens=False)


@pytest.fixture
def old(plain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain, tmp_path / "old")


@pytest.fixture(scope="module", params=["tied", "untied", "tied padded", "untied padded"])
def expanded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expanded:
    folder = tmp_path_factory.mktemp("expand")
    tied = request.param.startswith("tied")
    build_tiny_checkpoint(folder / "old", spec=TinySpec(**SMALL, tied=tied), coord_tokens=False)
    old = Qwen3VLForConditionalGeneration.from_pretrained(folder / "old", dtype=torch.float32)
    num_old_tokens = len(AutoTokenizer.from_pretrained(folder / "old"))
    if "padded" in request.param:
        old.resize_token_embeddings(num_old_tokens + PADDING_ROWS, mean_resizing=False)
        with torch.no_grad():  # so far off that a mean or spread which counted them would show
            table(old)[num_old_tokens:] = 100.0
        old.save_pretrained(folder / "old")
    if tied:
        (folder / "new").mkdir()  # an empty folder is fine
    expand_vocab(folder / "old", folder / "new")
    return Expanded(old, load_model(folder / "new", "float32", "sdpa"), num_old_tokens, tied, folder / "new")


def table(model: Any) -> torch.Tensor:
    return model.get_input_embeddings().weight


def matrices(model: Any) -> list[torch.Tensor]:
    return [table(model).detach(), model.get_output_embeddings().weight.detach()]


def test_new_tokens_follow_the_old_ones_in_order(expanded: Expanded) -> None:
    tokenizer = expanded.new.processor.tokenizer
    first = expanded.num_old_tokens
    assert tokenizer.convert_tokens_to_ids(list(NEW_TOKENS)) == list(range(first, first + 1001))
    assert expanded.new.vocab.coord_token_ids == tuple(range(first + 1, first + 1001))
    assert tokenizer("a<|coord_7|><|coord_70|> ", add_special_tokens=False)["input_ids"][1:3] == [first + 8, first + 71]
    assert tokenizer.decode([first + 1, first + 1000]) == "<|coord_0|><|coord_999|>"
    assert tokenizer.decode([first + 1], skip_special_tokens=True) == ""
    config: Any = expanded.new.model.config
    assert config.text_config.vocab_size == first + 1001


def test_old_rows_and_everything_but_the_vocabulary_keep_their_values(expanded: Expanded) -> None:
    before, after, first = expanded.old.state_dict(), expanded.new.model.state_dict(), expanded.num_old_tokens
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert changed == {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - changed)
    for name in changed:
        assert after[name].shape[0] == first + 1001 and torch.equal(before[name][:first], after[name][:first])


def test_tied_heads_stay_tied(expanded: Expanded) -> None:
    model: Any = expanded.new.model
    assert (table(model) is model.get_output_embeddings().weight) == expanded.tied
    assert model.config.tie_word_embeddings == expanded.tied


def test_new_rows_are_distinct_ordered_and_as_large_as_old_ones(expanded: Expanded) -> None:
    first = expanded.num_old_tokens
    for matrix in matrices(expanded.new.model):
        old, wildcard, coords = matrix[:first], matrix[first], matrix[first + 1 :]
        mean = old.mean(0)
        std = (old - mean).square().mean().sqrt()
        torch.testing.assert_close(wildcard, mean)
        assert (coords - mean).square().mean().sqrt().item() == pytest.approx(std.item(), rel=0.1)
        distance = torch.cdist(coords, coords)
        nearest = distance + torch.eye(1000) * distance.max()
        assert nearest.min() > 0.05 * distance.mean(), "all bins differ"
        bins = torch.arange(1000)
        neighbour = (nearest.argmin(1) - bins).abs()
        assert (neighbour <= 2).all(), "the most similar row is a neighbouring bin's"
        by_gap = [distance.diagonal(gap).mean() for gap in (1, 2, 4, 8, 16)]
        assert by_gap == sorted(by_gap), "further bins are further apart"


def test_other_checkpoint_files_are_copied(expanded: Expanded) -> None:
    old = expanded.folder.parent / "old"
    assert {path.name for path in old.iterdir()} == {path.name for path in expanded.folder.iterdir()}
    assert expanded.new.processor.chat_template == AutoTokenizer.from_pretrained(old).chat_template
    assert expanded.new.model.generation_config.eos_token_id == expanded.old.generation_config.eos_token_id
    assert expanded.new.processor.image_processor.patch_size == 8
    assert {path.stat().st_mode for path in expanded.folder.iterdir()} == {(old / "config.json").stat().st_mode}


def test_the_dtype_is_kept(old: Path, tmp_path: Path) -> None:
    Qwen3VLForConditionalGeneration.from_pretrained(old, dtype=torch.bfloat16).save_pretrained(old)
    expand_vocab(old, tmp_path / "new")
    new = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "new", dtype="auto")
    assert new.dtype == torch.bfloat16
    coords = table(new)[-1000:]
    assert len(torch.unique(coords, dim=0)) == 1000, "still distinct after rounding"


def with_some_tokens(folder: Path, tokens: Sequence[str], num_rows: int) -> tuple[Any, int]:
    """Give the tokenizer of a checkpoint ``tokens`` and its model ``num_rows`` rows for them. Returns the model and the
    number of other tokens."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    used = len(tokenizer)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    model.resize_token_embeddings(used + num_rows, mean_resizing=False)
    model.save_pretrained(folder)
    return model, used


@pytest.mark.parametrize("num_rows", [0, 10], ids=["no coordinate has a row", "some have one"])
def test_tokens_without_rows_get_rows(old: Path, tmp_path: Path, num_rows: int) -> None:
    """The tokens were added to the tokenizer but not to the model; some of them have padding rows."""
    model, used = with_some_tokens(old, NEW_TOKENS, num_rows)
    with pytest.raises(VocabError, match="embedding rows"):
        load_vocab(old)
    expand_vocab(old, tmp_path / "new")
    rows = table(load_model(tmp_path / "new", "float32").model).detach()
    assert torch.equal(rows[:used], table(model)[:used])
    gaps = (rows[used + 2 :] - rows[used + 1 : -1]).norm(dim=1)
    assert gaps.max() < 3 * gaps.min(), "the code is smooth from the first bin to the last"


def test_only_missing_tokens_are_added(old: Path, tmp_path: Path) -> None:
    model, used = with_some_tokens(old, COORD_TOKENS[5:7], 2)
    known = [used, used + 1]
    expand_vocab(old, tmp_path / "new")
    new = load_model(tmp_path / "new", "float32")
    assert [new.vocab.coord_token_ids[k] for k in (5, 6)] == known
    rows = table(new.model)
    assert torch.equal(rows[known], table(model)[known]), "trained rows are kept"
    assert len(rows) == used + 2 + 999


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("complete") / "model", spec=TinySpec(**SMALL))


def test_refuses_other_checkpoints_than_qwen3_vl(tmp_path: Path) -> None:
    """As loading a model does: test_load.py has a row for each file that is missing or broken."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"'llama'.*'qwen3_vl'"):
        expand_vocab(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("weights", [None, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "cut off"])
def test_refuses_missing_and_damaged_weights_as_model_info_does(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes | str | None
) -> None:
    file = old / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if weights is not None:
        file.write_bytes(whole[:-1000] if isinstance(weights, str) else weights)
    monkeypatch.setattr("coordexp.modeling.expand_vocab.read_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as expected:
        describe(old)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        expand_vocab(old, tmp_path / "new")
    assert str(error.value) == str(expected.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_weights_that_are_pickled_are_named(old: Path, tmp_path: Path) -> None:
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"missing; pytorch_model\.bin is not read; save it as safetensors$"):
        expand_vocab(old, tmp_path / "new")


def test_refuses_a_checkpoint_with_coordinate_tokens(tmp_path: Path, with_tokens: Path) -> None:
    with pytest.raises(CheckpointError, match="already"):
        expand_vocab(with_tokens, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("target", ["folder with a file", "file", "the checkpoint itself"])
def test_refuses_to_overwrite(tmp_path: Path, with_tokens: Path, target: str) -> None:
    output = {"folder with a file": tmp_path, "file": tmp_path / "mine", "the checkpoint itself": with_tokens}[target]
    (tmp_path / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="folder"):
        expand_vocab(with_tokens, output)
    assert (tmp_path / "mine").read_text() == "x"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_changes_its_tie_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    build_tiny_checkpoint(tmp_path / "old", spec=TinySpec(**SMALL, tied=tied), coord_tokens=False)
    resize = Qwen3VLForConditionalGeneration.resize_token_embeddings

    def resize_and_break(model: Any, *args: Any, **kwargs: Any) -> None:
        resize(model, *args, **kwargs)
        embedding = table(model)
        model.lm_head.weight = torch.nn.Parameter(embedding.detach().clone()) if tied else embedding

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "resize_token_embeddings", resize_and_break)
    with pytest.raises(CheckpointError, match="untied" if tied else "tied"):
        expand_vocab(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
