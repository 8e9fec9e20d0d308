"""The one encoder: the same prompt tokens everywhere, images as they were annotated, mismatches decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coordexp.data.jsonl import read_jsonl
from coordexp.errors import AlignmentError, DataError
from coordexp.modeling.inputs import PromptEncoder, check_prompt, row_inputs
from coordexp.modeling.load import LoadedModel
from support.tiny_run import PROMPT, encoder_of, gt_segments, row_of, tiny_scenes


def test_request_has_image_tokens_and_messages(loaded: LoadedModel) -> None:
    record = read_jsonl(tiny_scenes())[0]
    request = encoder_of(loaded).encode(record)
    assert (request.sample_id, request.image) == (record.sample_id, record.image)
    assert request.messages[0]["content"][0] == {"type": "image", "image": str(record.image)}
    _, rows, columns = request.model_inputs["image_grid_thw"][0].tolist()
    assert (rows, columns) == (record.height // 8, record.width // 8)
    assert len(request.model_inputs["pixel_values"]) == rows * columns
    assert request.prompt_token_ids.count(loaded.image_token_id) == rows * columns // 4
    assert PROMPT in loaded.vocab.decode(request.prompt_token_ids)


def test_prompt_and_system_message_are_encoded(loaded: LoadedModel) -> None:
    record = read_jsonl(tiny_scenes())[0]
    texts = {
        loaded.vocab.decode(PromptEncoder(loaded.processor, prompt, system).encode(record).prompt_token_ids)
        for prompt, system in ((None, None), ("Find cats.", None), ("Find cats.", "Be brief."))
    }
    assert len(texts) == 3
    assert sum("Find cats." in text for text in texts) == 2 and sum("Be brief." in text for text in texts) == 1


def test_image_of_another_size_than_annotated_is_refused(loaded: LoadedModel) -> None:
    record = replace(read_jsonl(tiny_scenes())[0], width=65)
    with pytest.raises(DataError, match="65"):
        encoder_of(loaded).encode(record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_tensors_have_the_documented_shapes(loaded: LoadedModel, dtype: torch.dtype) -> None:
    segments = gt_segments(loaded, 3)
    row = row_of(segments)
    rope_index = loaded.model.model.get_rope_index
    packed, sdpa = (row_inputs(row, rope_index, loaded.image_token_id, kind, dtype) for kind in ("packed", "sdpa"))
    assert packed["input_ids"].shape == (1, row.length)
    assert packed["position_ids"].shape == (4, 1, row.length)
    assert packed["pixel_values"].dtype == dtype
    assert packed["image_grid_thw"].shape == (3, 3)
    assert packed["mm_token_type_ids"].sum() == sum(s.prompt_token_ids.count(loaded.image_token_id) for s in segments)
    assert packed["segments"].lengths == tuple(segment.length for segment in segments)
    assert sdpa.keys() == packed.keys() - {"attention_mask", "segments"}


@pytest.mark.parametrize(
    ("reported", "at"),
    [((1, 9, 3), "token 1: learner '(2, 3)', rollout '(9, 3)'"),
     ((1, 2), "token 2: learner '(3,)', rollout '()'"),
     ((1, 2, 3, 4), "token 3: learner '()', rollout '(4,)'"),
     ((), "token 0: learner '(1, 2, 3)', rollout '()'")],
)  # fmt: skip
def test_first_difference_of_prompts_is_named(reported: tuple[int, ...], at: str) -> None:
    with pytest.raises(AlignmentError) as caught:
        check_prompt("scene 7", (1, 2, 3), reported, str)
    assert at in str(caught.value) and str(caught.value).startswith("scene 7: ")
