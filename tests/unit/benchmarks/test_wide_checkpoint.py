"""The wide checkpoint of ``benchmarks/decode.py`` computes the narrow one's function."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordexp.data.scenes import COLOURS
from coordexp.modeling.attention import transformers_names
from coordexp.modeling.load import load_model

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
wide_checkpoint: Any = importlib.import_module("wide_checkpoint")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint

    spec = TinySpec(hidden=64, layers=2, heads=2, kv_heads=1, mlp=96, vision_hidden=64, vision_depth=2, vision_heads=1)
    return load_model(
        build_tiny_checkpoint(tmp_path_factory.mktemp("narrow") / "model", spec=spec), "float32", "packed"
    )


def row_of(loaded: Any, model: Any, objects: int = 3) -> tuple[dict[str, Any], torch.Tensor]:
    from coordexp.modeling.inputs import PromptEncoder

    encoder = PromptEncoder(loaded.processor, None, None)
    return wide_checkpoint.packed_row(model, encoder, loaded.vocab, list(wide_checkpoint.scene_records(1, objects, 7)))


def test_widened_model_has_the_narrow_ones_logits(narrow: Any) -> None:
    width = wide_checkpoint.Width(hidden=160, mlp=256, heads=6, kv_heads=3, layers=4)
    wide = wide_checkpoint.widened(narrow.model.eval(), width)
    wide.set_attn_implementation(transformers_names("packed"))
    layer = wide.model.language_model.layers[3]
    assert layer.self_attn.q_proj.weight.shape == (6 * 64, 160) and layer.mlp.up_proj.weight.abs().min() > 0
    inputs, _ = row_of(narrow, narrow.model)
    with torch.no_grad():
        expected, found = (model(**inputs, use_cache=False).logits for model in (narrow.model, wide))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_widening_to_another_grouping_of_heads_is_refused(narrow: Any) -> None:
    with pytest.raises(ValueError, match="query heads per key head"):
        wide_checkpoint.widened(narrow.model, wide_checkpoint.Width(160, 256, 6, 6, 4))


def test_scenes_have_the_wanted_number_of_boxes_in_order() -> None:
    for objects in (3, 10, 40):
        _, record = next(wide_checkpoint.scene_records(1, objects, 7))
        assert len(record.objects) == objects and all(one.kind == "bbox_2d" for one in record.objects)
        assert all(one.desc.split()[0] in COLOURS for one in record.objects)
        tops = [one.bins[1] for one in record.objects]
        assert tops == sorted(tops)


def test_loss_of_a_coordinate_is_smaller_near_the_right_bin(narrow: Any) -> None:
    first, size = 5, 1010
    logits = torch.full((3, size), -10.0)
    for row, token in enumerate((first + 500, first + 503, first + 900)):
        logits[row, token] = 10.0
    losses, right = wide_checkpoint.answer_losses(logits, torch.full((3,), first + 500), first)
    assert losses[0] < losses[1] < losses[2] and len(right) == 0
    _, right = wide_checkpoint.answer_losses(logits, torch.tensor([first + 500, 2, 3]), first)
    assert np.array_equal(right, [False, False])


def test_kind_of_a_token_counts_extra_for_coordinates_and_text(narrow: Any) -> None:
    first, size = 5, 1010
    logits = torch.zeros(2, size)  # every token has the same probability
    label = torch.tensor([first + 500, 2])
    usual, extra = (wide_checkpoint.answer_losses(logits, label, first, weight)[0] for weight in (0.0, 2.0))
    expected = -2 * torch.tensor([1000 / size, 10 / size]).log()
    torch.testing.assert_close(extra - usual, expected)
