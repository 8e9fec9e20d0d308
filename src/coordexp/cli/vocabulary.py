"""The tokenizer of a checkpoint, for commands that only read: without torch where its files allow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordexp.coords import CoordVocab


def vocabulary_of(checkpoint: Path) -> CoordVocab:
    """The coordinate vocabulary of a checkpoint folder, or of the one to which its adapters belong.

    Raises:
        CheckpointError: no Qwen3-VL checkpoint, or no readable tokenizer. VocabError: no coordinate tokens.
    """
    from coordexp.checkpoints.folder import read_config_file
    from coordexp.checkpoints.tokenizer import has_tokenizer_file, read_vocab

    read_config_file(checkpoint)
    if has_tokenizer_file(checkpoint):
        return read_vocab(checkpoint)
    from coordexp.modeling.load import load_vocab  # with vocab.json alone, transformers knows the rest

    return load_vocab(checkpoint)
