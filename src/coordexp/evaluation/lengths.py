"""How many tokens a sample takes in training, without opening its image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordexp.checkpoints.folder import base_checkpoint
from coordexp.coords import serialize_objects
from coordexp.data.smart_resize import smart_resize
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import load_processor, load_vocab, read_config
from coordexp.records import ImageRecord


def token_counter(
    checkpoint: Path, sample: ImageRecord, prompt: str | None = None, system: str | None = None
) -> Callable[[ImageRecord], int]:
    """A function from a record to the length of its prompt and answer, as training would make them.

    The prompt's text is the same for all; it is measured on ``sample``, whose image must be readable. Image tokens
    follow from an image's size.

    Raises:
        CheckpointError, VocabError: the checkpoint cannot be read. DataError: the sample's image cannot be.
    """
    vocab = load_vocab(checkpoint)
    processor: Any = load_processor(base_checkpoint(checkpoint))
    image_token = read_config(checkpoint).image_token_id
    vision = processor.image_processor
    factor = vision.patch_size * vision.merge_size
    low, high = vision.size["shortest_edge"], vision.size["longest_edge"]

    def image_tokens(record: ImageRecord) -> int:
        height, width = smart_resize(record.height, record.width, factor, low, high)
        return (height // factor) * (width // factor)

    prompt_ids = PromptEncoder(processor, prompt, system).encode(sample).prompt_token_ids
    counted = sum(1 for token_id in prompt_ids if token_id == image_token)
    assert counted == image_tokens(sample), "image tokens follow from the size; the processor disagrees"
    text_tokens = len(prompt_ids) - counted

    def count(record: ImageRecord) -> int:
        answer = len(vocab.encode_answer(serialize_objects(record.objects))) + 1  # and the end of the turn
        return text_tokens + image_tokens(record) + answer

    return count
