"""Self-context: gradients of the loop on a toy model against finite differences; each forward of a packed row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coordexp.modeling.inputs import VisionTower, row_inputs
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.self_context import (
    EmbedMode,
    GradMode,
    SelfContext,
    coord_embeddings,
    self_context_states,
    unroll,
)
from coordexp.modeling.trainer_weights import add_coord_offset
from coordexp.objective import SupervisionTensors
from coordexp.records import Segment
from support.tiny_run import gt_segments, load_tiny, row_of

# --- the loop, in float64 ---

HIDDEN, BINS, SLOTS = 5, 7, 3


class ToyModel(torch.nn.Module):
    """Three coordinate slots behind one another; each sees its own input and the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.7)

        self.table_BH = weight(BINS, HIDDEN)
        self.mix_HH = weight(HIDDEN, HIDDEN)
        self.head_BH = weight(BINS, HIDDEN)
        self.token_KH = weight(SLOTS, HIDDEN)  # the ground truth's own embeddings, where nothing is fed
        self.calls: list[bool] = []

    def forward(self, fed_KH: torch.Tensor | None) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        embedded_KH = self.token_KH if fed_KH is None else fed_KH
        return torch.tanh(embedded_KH @ self.mix_HH + embedded_KH.mean(0))

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        return hidden_KH @ self.head_BH.T

    def run(self, settings: SelfContext) -> tuple[torch.Tensor, torch.Tensor]:
        return unroll(self, self.logits, self.table_BH, settings)


def text_loss(model: ToyModel, settings: SelfContext) -> torch.Tensor:
    return model.logits(model.run(settings)[0]).logsumexp(-1).sum()


def coord_loss(model: ToyModel, settings: SelfContext) -> torch.Tensor:
    log_p_KB = model.logits(model.run(settings)[1]).log_softmax(-1)
    return -log_p_KB[torch.arange(SLOTS), torch.tensor([1, 4, 6])].sum()


def numeric_gradient(loss: Callable[[], torch.Tensor], parameter: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    gradient = torch.zeros_like(parameter)
    flat, out = parameter.data.view(-1), gradient.view(-1)
    for index in range(flat.numel()):
        old = flat[index].item()
        flat[index] = old + eps
        above = loss().item()
        flat[index] = old - eps
        below = loss().item()
        flat[index] = old
        out[index] = (above - below) / (2 * eps)
    return gradient


def gradients(loss: torch.Tensor, model: ToyModel) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(model.named_parameters(), found, strict=True)
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_the_unrolled_loop_has_the_gradient_of_finite_differences(iterations: int, temperature: float) -> None:
    model, settings = ToyModel(), SelfContext(iterations, "soft", "unroll", temperature)
    found = gradients(coord_loss(model, settings) + text_loss(model, settings), model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            numeric = numeric_gradient(lambda: coord_loss(model, settings) + text_loss(model, settings), parameter)
        torch.testing.assert_close(found[name], numeric, atol=1e-7, rtol=1e-6)


def test_straight_through_has_the_tokens_value_and_the_means_gradient() -> None:
    z_KB = torch.randn(SLOTS, BINS, requires_grad=True)
    table_BH = torch.randn(BINS, HIDDEN, requires_grad=True)
    upstream_KH = torch.randn(SLOTS, HIDDEN)
    fed = {mode: coord_embeddings(z_KB, table_BH, mode, 0.7) for mode in ("soft", "st", "hard")}
    assert torch.equal(fed["st"], fed["hard"]) and torch.equal(fed["hard"], table_BH[z_KB.argmax(-1)])
    torch.testing.assert_close(fed["soft"], (z_KB / 0.7).softmax(-1) @ table_BH)
    soft, straight = (torch.autograd.grad(fed[mode], (z_KB, table_BH), upstream_KH) for mode in ("soft", "st"))
    assert torch.equal(soft[0], straight[0]) and torch.equal(soft[1], straight[1])
    only_table = torch.autograd.grad(fed["hard"], (z_KB, table_BH), upstream_KH, allow_unused=True)
    assert only_table[0] is None and only_table[1] is not None


def test_autocast_does_not_round_the_mean_embedding() -> None:
    z_KB, table_BH = torch.randn(SLOTS, BINS), torch.randn(BINS, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        fed_KH = coord_embeddings(z_KB, table_BH, "soft", 0.7)
    assert torch.equal(fed_KH, coord_embeddings(z_KB, table_BH, "soft", 0.7))


@pytest.mark.parametrize("mode", ["soft", "st", "hard"])
@pytest.mark.parametrize("iterations", [2, 3])
def test_with_detached_embeddings_only_the_last_forward_has_gradient(mode: EmbedMode, iterations: int) -> None:
    """The coordinate loss depends on the last forward alone; its inputs are constants."""
    model = ToyModel()
    fed_KH = None
    for _ in range(iterations - 1):
        with torch.no_grad():
            fed_KH = coord_embeddings(model.logits(model(fed_KH)), model.table_BH, mode, 1.0)
    log_p_KB = model.logits(model(fed_KH)).log_softmax(-1)
    alone = gradients(-log_p_KB[torch.arange(SLOTS), torch.tensor([1, 4, 6])].sum(), model)
    found = gradients(coord_loss(model, SelfContext(iterations, mode, "em_detach", 1.0)), model)
    for name in found:
        assert torch.equal(found[name], alone[name]), name
    # Exactly zero: the ground truth's tokens and the table reach the last forward only through its inputs.
    assert not found["token_KH"].any() and not found["table_BH"].any()
    assert found["mix_HH"].any() and found["head_BH"].any()
    unrolled = gradients(coord_loss(model, SelfContext(iterations, "soft", "unroll", 1.0)), model)
    assert unrolled["token_KH"].any() and unrolled["table_BH"].any()


@pytest.mark.parametrize("grad_mode", ["unroll", "em_detach"])
def test_the_text_loss_depends_only_on_the_first_forward(grad_mode: GradMode) -> None:
    model = ToyModel()
    plain = gradients(text_loss(model, SelfContext(1, "st", "unroll", 1.0)), model)
    found = gradients(text_loss(model, SelfContext(3, "soft", grad_mode, 1.0)), model)
    for name in found:
        assert torch.equal(found[name], plain[name]), name


@pytest.mark.parametrize(
    ("grad_mode", "iterations", "with_gradient"),
    [
        ("unroll", 1, [True]),
        ("unroll", 4, [True, True, True, True]),
        ("em_detach", 1, [True]),
        ("em_detach", 2, [True, True]),
        ("em_detach", 4, [True, False, False, True]),  # those between keep no activations
    ],
)
def test_forwards_that_keep_a_graph(grad_mode: GradMode, iterations: int, with_gradient: list[bool]) -> None:
    model = ToyModel()
    model.run(SelfContext(iterations, "soft", grad_mode, 1.0))
    assert model.calls == with_gradient


# --- a real packed row ---


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Sharpened: flat random predictions would feed the same mean everywhere."""
    return load_tiny(sharpen=4.0)


@pytest.fixture(scope="module")
def segments(loaded: LoadedModel) -> list[Segment]:
    found = [segment for segment in gt_segments(loaded, 12) if len(segment.target.coord_pos_K)]
    assert {len(segment.target.box_pos_M4) * 4 < len(segment.target.coord_pos_K) for segment in found} == {True, False}
    return found  # some with polygons, some with boxes only


def coord_positions(segments: Sequence[Segment]) -> torch.Tensor:
    supervision = SupervisionTensors.from_row(row_of(segments))
    return supervision.position_N[supervision.coord_in_N_K]


def run(loaded: LoadedModel, segments: Sequence[Segment], settings: SelfContext) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = loaded.model
    ids_B = torch.tensor(loaded.vocab.coord_token_ids)
    return self_context_states(
        model,
        inputs_of(loaded, segments),
        coord_positions(segments),
        lambda h_KH: h_KH @ model.lm_head.weight[ids_B].T,
        ids_B,
        settings,
    )


def inputs_of(loaded: LoadedModel, segments: Sequence[Segment]) -> dict[str, Any]:
    rope_index, tower = loaded.model.model.get_rope_index, VisionTower.from_model(loaded.model)
    return row_inputs(row_of(segments), rope_index, loaded.image_token_id, loaded.attention, tower)


@contextmanager
def watching(model: Any) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("mode", ["soft", "st", "hard"])
def test_only_coordinate_slots_are_replaced(loaded: LoadedModel, segments: list[Segment], mode: EmbedMode) -> None:
    model: Any = loaded.model
    inputs = inputs_of(loaded, segments[:4])
    slots_K = coord_positions(segments[:4])
    with watching(model) as calls:
        model.model(**inputs, use_cache=False)
        run(loaded, segments[:4], SelfContext(3, mode, "unroll", 1.0))
    plain, first, second, third = (call["inputs_embeds"][0] for call in calls)
    is_slot_L = torch.zeros(len(plain), dtype=torch.bool)
    is_slot_L[slots_K] = True
    is_image_L = inputs["input_ids"][0] == loaded.image_token_id
    assert is_image_L.sum() > 20 and not (is_image_L & is_slot_L).any()
    assert torch.equal(first, plain)
    for later in (second, third):
        assert torch.equal(later[is_image_L], plain[is_image_L])  # bit for bit
        assert torch.equal(later[~is_slot_L], plain[~is_slot_L])
        assert (later[is_slot_L] != plain[is_slot_L]).any(dim=1).all() or mode != "soft"
    assert not torch.equal(second[is_slot_L], plain[is_slot_L]) and not torch.equal(second, third)


@torch.no_grad()
def test_each_slot_is_fed_the_prediction_of_the_position_before_it(
    loaded: LoadedModel, segments: list[Segment]
) -> None:
    """Against logits of the whole row, computed by the model itself."""
    model: Any = loaded.model
    slots_K, ids_B = coord_positions(segments[:4]), torch.tensor(loaded.vocab.coord_token_ids)
    logits_LV = model(**inputs_of(loaded, segments[:4]), use_cache=False).logits[0]
    expected_KH = coord_embeddings(
        logits_LV[slots_K - 1][:, ids_B], model.get_input_embeddings().weight[ids_B], "soft", 0.1
    )
    with watching(model) as calls:
        run(loaded, segments[:4], SelfContext(2, "soft", "unroll", 0.1))
    torch.testing.assert_close(calls[1]["inputs_embeds"][0, slots_K], expected_KH, atol=1e-5, rtol=1e-5)
    assert (logits_LV[slots_K - 1][:, ids_B] / 0.1).softmax(-1).amax() > 0.05, (
        "flat predictions would be equal anywhere"
    )


@torch.no_grad()
def test_every_forward_has_the_rows_positions_and_no_cache_and_the_vision_tower_runs_once(
    loaded: LoadedModel, segments: list[Segment]
) -> None:
    model: Any = loaded.model
    inputs, images = inputs_of(loaded, segments), []
    handle = model.model.visual.register_forward_hook(lambda *_: images.append(1))
    with watching(model) as calls:
        run(loaded, segments, SelfContext(4, "st", "unroll", 1.0))
    handle.remove()
    assert len(calls) == 4 and images == [1]
    for call in calls:
        assert torch.equal(call["position_ids"], inputs["position_ids"]) and call["position_ids"].shape[0] == 4
        assert call["use_cache"] is False and call.get("past_key_values") is None
        assert call["segments"].lengths == tuple(segment.length for segment in segments)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("mode", ["soft", "st"])
def test_a_packed_row_equals_its_segments_alone(segments: list[Segment], mode: EmbedMode, attention: str) -> None:
    loaded = load_tiny(attention=attention, sharpen=4.0)
    settings = SelfContext(3, mode, "unroll", 1.0)
    together = run(loaded, segments, settings)
    lengths = [segment.length for segment in segments]
    alone = [run(loaded, [segment], settings) for segment in segments]
    for forward in (0, 1):
        parts = together[forward].split(lengths)
        for part, states in zip(parts, alone, strict=True):
            torch.testing.assert_close(part, states[forward], atol=2e-5, rtol=1e-4)
    assert (together[0] - together[1]).abs().max() > 1e-2, "the last forward must have other inputs than the first"


@torch.no_grad()
def test_one_iteration_equals_a_plain_forward(loaded: LoadedModel, segments: list[Segment]) -> None:
    model: Any = loaded.model
    first, last = run(loaded, segments, SelfContext(1, "st", "unroll", 1.0))
    assert first is last
    assert torch.equal(first, model.model(**inputs_of(loaded, segments), use_cache=False).last_hidden_state[0])


@torch.no_grad()
def test_offsets_of_the_coordinate_rows_are_fed_too(segments: list[Segment]) -> None:
    """A LoRA run trains an offset on the coordinate embeddings, and what is fed is made of the sums."""
    loaded = load_tiny(sharpen=4.0)
    model: Any = loaded.model
    ids_B = torch.tensor(loaded.vocab.coord_token_ids)
    add_coord_offset(model, loaded.vocab.coord_token_ids)
    offset = model.get_input_embeddings().coord_offset
    offset.data = torch.randn(offset.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    with watching(model) as calls:
        run(loaded, segments[:2], SelfContext(2, "hard", "unroll", 1.0))
    fed_KH = calls[1]["inputs_embeds"][0, coord_positions(segments[:2])]
    table_BH = model.get_input_embeddings().weight[ids_B] + offset
    nearest_K = torch.cdist(fed_KH, table_BH).argmin(-1)
    torch.testing.assert_close(fed_KH, table_BH[nearest_K])


@pytest.mark.parametrize("grad_mode", ["unroll", "em_detach"])
def test_gradient_checkpointing_changes_no_gradient(segments: list[Segment], grad_mode: Any) -> None:
    def gradients_of(checkpointing: bool) -> dict[str, torch.Tensor]:
        loaded = load_tiny(sharpen=2.0)
        model: Any = loaded.model
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        first, last = run(loaded, segments[:3], SelfContext(3, "soft", grad_mode, 1.0))
        (first.square().mean() + last.square().mean() * 3).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients_of(False), gradients_of(True)
    assert plain.keys() == checkpointed.keys() and len(plain) > 20
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
