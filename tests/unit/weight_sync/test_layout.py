"""Coverage of pushed names, on a small model that is fused, renamed and tied as vLLM's are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from coordexp.errors import RolloutError
from coordexp.weight_sync.receiver import Place, WeightLayout
from support.fused_model import SHAPES, FusedModel


@pytest.fixture
def layout() -> WeightLayout:
    return WeightLayout.from_model(FusedModel())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.language.layer.norm.weight", Place("language.model.layer.norm.weight")),
        ("visual.qkv.bias", Place("visual.qkv.bias")),
        ("lm_head.weight", Place("language.model.embed.weight")),
        (
            "model.language.layer.k_proj.weight",
            Place("language.model.layer.qkv_proj.weight", "k_proj", ("q_proj", "k_proj", "v_proj")),
        ),
    ],
    ids=["renamed", "the same", "tied", "fused, in a wrapped layer"],
)
def test_destination_of_a_tensor(layout: WeightLayout, name: str, place: Place) -> None:
    assert layout.place(name) == place


@pytest.mark.parametrize("name", ["model.language.layer.o_proj.weight", "layer.norm.weight", "", "lm_head.bias"])
def test_a_name_without_a_destination_is_refused(layout: WeightLayout, name: str) -> None:
    with pytest.raises(RolloutError, match="not a weight of the engine's model"):
        layout.place(name)


def without(*missing: str) -> Iterable[str]:
    return [name for name in SHAPES if name not in missing]


def test_names_cover_the_model_with_and_without_tied_head(layout: WeightLayout) -> None:
    layout.check_complete(SHAPES)
    layout.check_complete([*SHAPES, "lm_head.weight"])


@pytest.mark.parametrize("missing", list(SHAPES))
def test_each_missing_name_is_detected(layout: WeightLayout, missing: str) -> None:
    with pytest.raises(RolloutError, match="1 of the engine's weights were not sent") as refused:
        layout.check_complete(without(missing))
    place = layout.place(missing)
    assert place.parameter in str(refused.value) and place.part in str(refused.value)


def test_parts_that_do_not_fill_their_destination_are_an_error(layout: WeightLayout) -> None:
    with pytest.raises(RolloutError, match=r"v_proj\.weight has shape \(3, 3\)"):
        list(layout.read_back({**SHAPES, "model.language.layer.v_proj.weight": (3, 3)}))
