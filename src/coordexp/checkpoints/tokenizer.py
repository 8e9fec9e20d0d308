"""The coordinate vocabulary of a checkpoint, from ``tokenizer.json`` alone: what commands that only read need of it.

transformers takes seconds to import. The library under its fast tokenizers takes none, and reads the same file; that
both give one vocabulary is a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordexp.checkpoints.folder import TOKENIZER, base_checkpoint, read_object
from coordexp.coords import CoordVocab
from coordexp.errors import CheckpointError, VocabError


def has_tokenizer_file(path: str | Path) -> bool:
    """Whether :func:`read_vocab` can read the checkpoint; one with ``vocab.json`` alone needs transformers."""
    return (base_checkpoint(path) / TOKENIZER).is_file()


def read_vocab(path: str | Path) -> CoordVocab:
    """The vocabulary of a checkpoint folder. Nothing but its tokenizer's files is looked at.

    Raises:
        CheckpointError: no readable ``tokenizer.json``. VocabError: no coordinate tokens.
    """
    folder = base_checkpoint(path)
    try:
        return CoordVocab.from_tokenizer(_FileTokenizer(folder))
    except VocabError as error:
        raise VocabError(f"{path}: {error}") from error


class _FileTokenizer:
    """As much of transformers' fast tokenizer as :class:`CoordVocab` asks for."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises no type of its own
            raise CheckpointError(
                f"{folder}: its tokenizer cannot be read ({error}); restore the checkpoint's files"
            ) from error
        self._tokenizer.no_truncation()  # the file may ask for either
        self._tokenizer.no_padding()
        settings = read_object(folder, "special_tokens_map.json", "tokenizer's settings")
        settings |= read_object(folder, "tokenizer_config.json", "tokenizer's settings")
        self.eos_token_id = self._id(settings.get("eos_token"))
        self.pad_token_id = self._id(settings.get("pad_token"))
        extra = [*_list(settings, "extra_special_tokens"), *_list(settings, "additional_special_tokens")]
        named = [value for name, value in settings.items() if name.endswith("_token")]
        ids = {self._id(token) for token in [*extra, *named] if isinstance(token, str | dict)}
        self.all_special_ids = sorted(token_id for token_id in ids if token_id is not None)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str | list[str], add_special_tokens: bool) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        encoded = self._tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encoded]}

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def _id(self, token: Any) -> int | None:
        """Of a token as ``tokenizer_config.json`` names it: its text, or an object that holds it."""
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if isinstance(content, str) else None


def _list(settings: dict[str, Any], name: str) -> list[Any]:
    entries = settings.get(name) or []
    return list(entries.values()) if isinstance(entries, dict) else list(entries)
