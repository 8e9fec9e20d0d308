"""Channel-A's self-context: forward passes over one row that read the model's own coordinates.

Self-context reads the ground-truth answer with the model's own coordinates in its place. The first forward reads the
ground-truth text as it is. Each later one reads the same text, but at every coordinate slot p the input embedding is
made from what the previous forward predicted there, at p − 1, over the 1000 coordinate tokens:

    z_KB = previous forward's coordinate logits,  P_KB = softmax(z_KB / τ),  e_KH = P_KB · E_BH

So the model learns to write coordinates after its own earlier coordinates, without a rollout. Everything else stays bit
for bit: text, positions, and the image placeholders' embeddings.

K coordinate slots, B = 1000 bins, H hidden size, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from coordexp.modeling.inputs import image_arguments

Hidden = TypeVar("Hidden")
EmbedMode = Literal["st", "soft", "hard"]
GradMode = Literal["unroll", "em_detach"]


@dataclass(frozen=True, slots=True)
class SelfContext:
    """Keys ``stage2_ab.n_softctx_iter``, ``coord_ctx_embed_mode``, ``softctx_grad_mode``, ``softctx_temperature``.

    ``embed_mode``: ``soft`` feeds the mean embedding e; ``hard`` that of the most likely token; ``st`` (straight
    through) has hard's value and soft's gradient. ``grad_mode``: ``unroll`` differentiates through every forward,
    ``em_detach`` treats the fed embeddings as constants, so forwards between the first and the last have no gradient.
    """

    iterations: int
    embed_mode: EmbedMode
    grad_mode: GradMode
    temperature: float


def coord_embeddings(z_KB: torch.Tensor, table_BH: torch.Tensor, mode: EmbedMode, temperature: float) -> torch.Tensor:
    """Input embeddings of the coordinate slots: (K, H), in the table's dtype; the mean is in float32 or wider."""
    wide = table_BH.dtype if table_BH.dtype == torch.float64 else torch.float32
    hard_KH = None if mode == "soft" else table_BH[z_KB.detach().argmax(dim=-1)]
    if hard_KH is not None and mode == "hard":
        return hard_KH
    with torch.autocast(z_KB.device.type, enabled=False):  # it would round the probabilities
        mean_KH = ((z_KB.to(wide) / temperature).softmax(dim=-1) @ table_BH.to(wide)).to(table_BH.dtype)
    # The difference is exactly zero, so the value is the token's own embedding to the last bit.
    return mean_KH if hard_KH is None else hard_KH.detach() + (mean_KH - mean_KH.detach())


def unroll(
    forward: Callable[[torch.Tensor | None], Hidden],
    coord_logits: Callable[[Hidden], torch.Tensor],
    table_BH: torch.Tensor,
    settings: SelfContext,
) -> tuple[Hidden, Hidden]:
    """Run ``settings.iterations`` forwards; return the first and the last one's hidden states, maybe the same object.

    ``forward``: embeddings (K, H) for the coordinate slots, or None for their own tokens' → hidden states.
    ``coord_logits``: hidden states → (K, B) logits that predict the coordinate slots.
    """
    detach = settings.grad_mode == "em_detach"
    first = hidden = forward(None)
    for remaining in range(settings.iterations - 2, -1, -1):
        with torch.no_grad() if detach else nullcontext():
            fed_KH = coord_embeddings(coord_logits(hidden), table_BH, settings.embed_mode, settings.temperature)
        with torch.no_grad() if detach and remaining else nullcontext():
            hidden = forward(fed_KH)
    return first, hidden


def self_context_states(
    base: Any,
    inputs: Mapping[str, Any],
    coord_pos_K: torch.Tensor,
    coord_logits: Callable[[torch.Tensor], torch.Tensor],
    coord_ids_B: torch.Tensor,
    settings: SelfContext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last forward's hidden states of one packed row, each (L, H).

    Runs inside one call of the wrapped model, so that DDP and FSDP see one forward and one backward. The vision tower
    runs once for all iterations, and the cache is off in each of them.

    Args:
        base: the bare Qwen3-VL model; ``inputs`` of :func:`coordexp.modeling.inputs.row_inputs`.
        coord_pos_K: row positions of the coordinate tokens to substitute; ``coord_logits`` is the output head on the
            coordinate tokens ``coord_ids_B`` alone: hidden states (K, H) → (K, B).
    """
    embed = base.get_input_embeddings()
    text_inputs = {name: value for name, value in inputs.items() if name != "pixel_values"}
    images = base.model.get_image_features(
        inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True, **image_arguments(inputs)
    )

    def forward(fed_KH: torch.Tensor | None) -> torch.Tensor:
        def replace(module: torch.nn.Module, arguments: Any, embedded_1LH: torch.Tensor) -> torch.Tensor:
            assert fed_KH is not None
            return embedded_1LH.index_copy(1, coord_pos_K, fed_KH[None].to(embedded_1LH.dtype))

        # Image features replace the placeholders' embeddings after this hook, so it never changes them.
        with nullcontext() if fed_KH is None else embed.register_forward_hook(replace):
            states = base.model(**text_inputs, mm_encoder_outputs={"image": images}, use_cache=False)
        return states.last_hidden_state[0]

    def predict(hidden_LH: torch.Tensor) -> torch.Tensor:
        return coord_logits(hidden_LH[coord_pos_K - 1])

    return unroll(forward, predict, embed(coord_ids_B), settings)
