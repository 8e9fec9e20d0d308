"""The trainer's ways to compute one loss: ours, and the two that it is measured against. Shared by `trainer.py`.

All three give the same number. `padded` and `full` hold all the logits in float32 and take the coordinate gate from
them as it is usually written: clamping, a temperature and a logsumexp, each a buffer of vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from coordexp.config.objective import PipelineConfig
from coordexp.config.schema import TunerConfig
from coordexp.doctor.runs import product_flops
from coordexp.modeling.inputs import VisionTower, row_inputs, to_device
from coordexp.objective import RowObjective, RowTensors, SupervisionTensors, build_pipeline, coord_math
from coordexp.objective.pipeline import tree_map
from coordexp.packing import build_row, select_segments
from coordexp.records import NUM_BINS, Segment, TokenRole, TrainingTarget
from coordexp.targets import SupervisionWeights
from coordexp.targets.weights import weigh_tokens

SOFT_CE, W1, GATE, SIGMA = 1.0, 1.0, 1.0, 2.0
PIPELINE = {
    "objective": [
        {
            "name": "token_ce",
            "enabled": True,
            "weight": 1.0,
            "channels": ["B"],
            "config": {"struct_ce_weight": 1.0, "desc_ce_weight": 1.0, "rollout_fn_desc_weight": 0.0},
        },
        {
            "name": "coord_reg",
            "enabled": True,
            "weight": 1.0,
            "channels": ["B"],
            "config": {
                "coord_ce_weight": 0.0,
                "soft_ce_weight": SOFT_CE,
                "w1_weight": W1,
                "coord_gate_weight": GATE,
                "text_gate_weight": 0.0,
                "temperature": 1.0,
                "target_sigma": SIGMA,
                "target_truncate": None,
            },
        },
    ],
    "diagnostics": [],
}
# Token ids of the synthetic vocabulary; the last 1000 ids are the coordinates.
IMAGE, VISION_START, VISION_END, FIRST_WORD = 3, 4, 5, 10
ROLE_OF_ENTRY = [TokenRole.GT_STRUCT] * 6 + [TokenRole.GT_DESC] * 2 + [TokenRole.GT_STRUCT] * 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Qwen3-VL by its sizes. The vocabulary is real; the rest may be tiny."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vision_hidden: int
    vision_depth: int
    vision_mlp: int
    vocabulary: int = 152_670
    patch: int = 8


TINY = Sizes(192, 5, 4, 2, 64, 576, 128, 4, 384)
GPU_SIZES = {
    "2B": Sizes(2048, 28, 16, 8, 128, 6144, 1024, 24, 4096),
    "4B": Sizes(2560, 36, 32, 8, 128, 9728, 1024, 24, 4096),
}


def build_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """A random model of these sizes, attention by segments."""
    from transformers import Qwen3VLConfig

    from coordexp.modeling.attention import transformers_names
    from coordexp.modeling.load import Qwen3VLForConditionalGeneration
    from coordexp.modeling.patches import PixelScale

    third = sizes.head_dim // 2 // 3
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.mlp,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [sizes.head_dim // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden,
            "intermediate_size": sizes.vision_mlp,
            "num_heads": max(1, sizes.vision_hidden // 64),
            "patch_size": sizes.patch,
            "out_hidden_size": sizes.hidden,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3VLForConditionalGeneration(config)
        model = model.to(dtype)
    model.model.pixel_scale = PixelScale((127.5,) * 3, (127.5,) * 3, frames=2)
    model.set_attn_implementation(transformers_names("packed"))
    return model.train()


def draw_segments(lengths: Sequence[int], sizes: Sizes, seed: int = 0, answer: float = 2 / 3) -> list[Segment]:
    """Samples of these lengths: an image and a prompt, then as many boxes as fit in the share ``answer``."""
    rng = np.random.default_rng(seed)
    segments = []
    for number, length in enumerate(lengths):
        boxes = max(1, (int(length * answer) - 2) // (len(ROLE_OF_ENTRY) + 4))
        target = _target(str(number), boxes, sizes.vocabulary, rng)
        prompt = max(8, length - len(target.token_ids))
        side = 2 * max(1, int((prompt / 2) ** 0.5))
        placeholders = side * side // 4
        words = rng.integers(FIRST_WORD, FIRST_WORD + 500, max(1, prompt - placeholders - 2)).tolist()
        ids = (VISION_START, *[IMAGE] * placeholders, VISION_END, *words)
        inputs = {
            "pixel_values": torch.randint(0, 256, (side * side, 3 * sizes.patch**2), dtype=torch.uint8),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
        segments.append(Segment(str(number), ids, target, inputs))
    return segments


def _target(sample_id: str, boxes: int, vocabulary: int, rng: np.random.Generator) -> TrainingTarget:
    entry = len(ROLE_OF_ENTRY) + 4
    roles = ([*ROLE_OF_ENTRY, *[TokenRole.GT_COORD] * 4] * boxes) + [TokenRole.CLOSE, TokenRole.EOS]
    box_pos = np.arange(boxes)[:, None] * entry + np.arange(len(ROLE_OF_ENTRY), entry)
    box_bin = rng.integers(0, NUM_BINS, (boxes, 4))
    ids = rng.integers(FIRST_WORD, FIRST_WORD + 500, len(roles))
    ids[box_pos] = vocabulary - NUM_BINS + box_bin
    roles_T = np.array(roles, dtype=np.uint8)
    return TrainingTarget(
        sample_id, tuple(ids.tolist()), roles_T, box_pos.ravel(), box_bin.ravel().astype(float), box_pos,
        box_bin.astype(float), weigh_tokens(roles_T, box_pos, "gt", SupervisionWeights()), "gt", 0, (), (), (), (),
    )  # fmt: skip


def naive_gate_losses(logits_KV: torch.Tensor, bins_K: torch.Tensor, coord_ids: slice) -> torch.Tensor:
    """softCE + W1 + gate, summed, from all the logits of K coordinate slots in float32."""
    fenced_KV = torch.nan_to_num(logits_KV, nan=0.0, posinf=1e4, neginf=-1e4).clamp(-1e4, 1e4)
    full_K = torch.logsumexp(fenced_KV / 1.0, dim=-1)
    z_KB = logits_KV[:, coord_ids]
    z_KB = torch.nan_to_num(z_KB, nan=0.0, posinf=1e4, neginf=-1e4).clamp(-1e4, 1e4)
    log_p_KB = torch.log_softmax(z_KB / 1.0, dim=-1)
    q_KB = coord_math.gaussian_targets(bins_K.to(log_p_KB.dtype), NUM_BINS, SIGMA, None)
    gate_K = (full_K - torch.logsumexp(z_KB / 1.0, dim=-1)).clamp_min(0.0)
    soft_K = coord_math.soft_cross_entropy(log_p_KB, q_KB)
    return (SOFT_CE * soft_K + W1 * coord_math.wasserstein1(log_p_KB.exp(), q_KB) + GATE * gate_K).sum()


def all_logits_loss(
    logits_LV: torch.Tensor, supervision: SupervisionTensors, first_L: torch.Tensor, totals: Mapping[str, int]
) -> torch.Tensor:
    """The same loss from float32 logits of every position. ``first_L``: where each supervised token's logits are."""
    labels = torch.full((len(logits_LV),), -100, device=logits_LV.device)
    is_coord_N = supervision.weight_N("coord") > 0
    labels[first_L[~is_coord_N]] = supervision.label_N[~is_coord_N]
    text = F.cross_entropy(logits_LV, labels, reduction="sum") / (totals["struct_ce"] + totals["desc_ce"])
    slots = slice(logits_LV.shape[1] - NUM_BINS, None)
    coords = naive_gate_losses(logits_LV[first_L[is_coord_N]], supervision.coord_bin_K, slots)
    return text + coords / totals["coord"]


def pack(segments: Sequence[Segment], capacity: int) -> list[list[Segment]]:
    """Every segment, in the rows that the carry buffer would make of them."""
    waiting, rows = list(segments), []
    while waiting:
        chosen = set(select_segments([segment.length for segment in waiting], capacity))
        rows.append([segment for index, segment in enumerate(waiting) if index in chosen])
        waiting = [segment for index, segment in enumerate(waiting) if index not in chosen]
    return rows


def ours(model: Any, batch: Sequence[Segment], totals: Mapping[str, int]) -> torch.Tensor:
    """A packed row; the head in chunks at supervised positions."""
    inputs, supervision = _row(model, batch)
    vocabulary = model.config.text_config.vocab_size
    pipeline = build_pipeline(PipelineConfig.model_validate(PIPELINE))
    objective = RowObjective(pipeline, tuple(range(vocabulary - NUM_BINS, vocabulary)))
    row = RowTensors(build_row(batch), inputs, supervision, objective.queries(supervision)).to(model.device)
    scores = model(forward_fn=partial(objective.scores, row=row))
    return objective.result(row.supervision, scores, totals).loss


def full(model: Any, batch: Sequence[Segment], totals: Mapping[str, int]) -> torch.Tensor:
    """A packed row; all its logits in float32."""
    inputs, supervision = _row(model, batch)
    logits_LV = model(**to_device(inputs, model.device), use_cache=False).logits[0].float()
    supervision = tree_map(lambda tensor: tensor.to(model.device), supervision)
    return all_logits_loss(logits_LV, supervision, supervision.position_N - 1, totals)


def padded(model: Any, batch: Sequence[Segment], totals: Mapping[str, int]) -> torch.Tensor:
    """One row per sample, padded to the longest; all their logits in float32."""
    longest = max(segment.length for segment in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, segment in enumerate(batch):
        ids[row, : segment.length] = torch.tensor([*segment.prompt_token_ids, *segment.target.token_ids])
        mask[row, : segment.length] = 1
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat([segment.model_inputs["pixel_values"] for segment in batch]),
        "image_grid_thw": torch.cat([segment.model_inputs["image_grid_thw"] for segment in batch]),
    }
    logits = model(**to_device(inputs, model.device), use_cache=False).logits.float()
    row = build_row(batch)
    supervision = SupervisionTensors.from_row(row)
    starts = np.asarray(row.offsets[:-1])
    of_N = np.searchsorted(starts, supervision.position_N.numpy(), side="right") - 1
    first = torch.from_numpy(supervision.position_N.numpy() - 1 - starts[of_N] + of_N * longest)
    supervision = tree_map(lambda tensor: tensor.to(model.device), supervision)
    return all_logits_loss(logits.flatten(0, 1), supervision, first.to(model.device), totals)


FORMS: dict[str, Callable[[Any, Sequence[Segment], Mapping[str, int]], torch.Tensor]] = {
    "ours": ours,
    "padded": padded,
    "full": full,
}


def _row(model: Any, batch: Sequence[Segment]) -> tuple[dict[str, Any], SupervisionTensors]:
    row = build_row(batch)
    inputs = row_inputs(row, model.model.get_rope_index, IMAGE, "packed", VisionTower.from_model(model))
    return inputs, SupervisionTensors.from_row(row)


def flops_per_step(model: Any, segments: Sequence[Segment], scored: int) -> float:
    """Floating-point operations that the step needs: the matrix products of :func:`product_flops`, with the head at
    ``scored`` positions, and the language model's attention within segments. Further computation of a form does not
    count."""
    text = model.config.text_config
    pairs = sum(segment.length**2 for segment in segments) / 2
    attention = 12 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * pairs
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    units = {
        "tokens": sum(segment.length for segment in segments),
        "patches": sum(len(segment.model_inputs["pixel_values"]) for segment in segments),
        "supervised": scored,
    }
    return product_flops(TunerConfig(), model.config.to_dict(), shapes, **units) + attention
