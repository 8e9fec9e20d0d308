"""Write a checkpoint that answers in Qwen's tokenizer and costs what a wide model costs, for `decode.py --model`.

The demo's model learns to write boxes in Qwen's tokens, on generated scenes of 3, 10 and 40 objects. It trains with the
few rows of the vocabulary that occur; then all 152,670 are filled in. Then it is widened without changing its function:
new dimensions of the hidden state stay zero, new heads and MLP units write nothing, new layers add nothing. The
arithmetic is all done, so a step of the wide model takes the time and memory traffic of its size.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # Qwen's tokenizer is the tests'

from reporting import machine, parser, positive, positive_list, print_machine, set_threads

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.jsonl import order_objects, write_jsonl
from coordexp.data.scenes import COLOURS, SHAPES, SceneSpec, make_scene
from coordexp.modeling.widen import Width, widened
from coordexp.records import NUM_BINS, GTObject, ImageRecord, PackedRow, Segment

# Objects of an answer → its scenes. Names differ in the first two; in the third, one or two repeat.
SCENES = {
    3: SceneSpec(min_objects=3, max_objects=3, empty=0),
    10: SceneSpec(min_objects=10, max_objects=10, min_side=16, max_side=32, max_overlap=0.2, empty=0),
    40: SceneSpec(192, 40, 40, min_side=16, max_side=26, max_overlap=0.5, same_class=0.85, max_kinds=2, empty=0),
}
ROWS = ({3: 3, 10: 2}, {3: 3, 10: 2}, {40: 1})  # scenes of a training step, in turn
TRAINING_SEED, PROMPT = 0, "Detect every object."
SIGMA = 4.0  # bins: coordinates near the right one are nearly right
# Weights of a token's kind in the loss of the two phases. A crowd's next x1 is spread over hundreds of bins, so after
# the first phase the most probable token there can be a text token of low probability, and the answer breaks.
KIND_WEIGHTS = (0.0, 5.0)


def main(argv: Sequence[str] | None = None) -> None:
    flags, usual = parser(__doc__), Width()
    flags.add_argument("out", type=Path, help="new folder: narrow/ and wide/, two checkpoints")
    flags.add_argument("--demo", type=Path, default=Path("checkpoints/demo-stage1"), help="[checkpoints/demo-stage1]")
    flags.add_argument("--steps", type=positive_list, default=[1100, 200], help="of both phases of training [1100,200]")
    flags.add_argument("--hidden", type=positive, default=usual.hidden, help=f"[{usual.hidden}]")
    flags.add_argument("--mlp", type=positive, default=usual.mlp, help=f"[{usual.mlp}]")
    flags.add_argument("--layers", type=positive, default=usual.layers, help=f"[{usual.layers}]")
    options = flags.parse_args(argv)
    if len(options.steps) != len(KIND_WEIGHTS):
        flags.error(f"--steps: {options.steps} are not the steps of {len(KIND_WEIGHTS)} phases")
    console = Console()
    print_machine(console, machine(), threads=set_threads(options.threads), steps=options.steps)
    narrow = options.out / "narrow"
    if not (narrow / "config.json").is_file():
        write_narrow(options.demo, narrow, options.steps, console)
    width = Width(options.hidden, options.mlp, options.hidden // 64, options.hidden // 128, options.layers)
    write_wide(narrow, options.out / "wide", width)
    weights = (options.out / "wide" / "model.safetensors").stat().st_size
    console.print(f"{options.out / 'wide'}: {width}, {weights / 1e9:.2f} GB in bfloat16", highlight=False)


def scene_records(count: int, objects: int, seed: int) -> Iterator[tuple[Any, ImageRecord]]:
    """Images with exactly ``objects`` boxes, and their records; triangles have boxes too."""
    index = found = 0
    while found < count:
        image, drawn = make_scene(SCENES[objects], seed, index)
        index += 1
        if len(drawn) != objects:
            continue
        boxes = [GTObject(one.desc, "bbox_2d", _box(one)) for one in drawn]
        found += 1
        name = f"{objects}-{seed}-{index}"
        yield image, ImageRecord(name, Path(f"{name}.png"), *image.size, order_objects(boxes, "sorted"))


def _box(drawn: GTObject) -> tuple[int, int, int, int]:
    xs, ys = drawn.bins[::2], drawn.bins[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def write_images(folder: Path, counts: dict[int, int], seed: int) -> Path:
    """Write ``counts[n]`` scenes of n objects as a data set; return its JSONL."""
    folder.mkdir(parents=True)
    records = []
    for objects, count in counts.items():
        for image, record in scene_records(count, objects, seed):
            path = (folder / record.image).resolve()
            image.save(path)
            records.append(replace(record, image=path))
    write_jsonl(records, folder / "scenes.jsonl")
    return folder / "scenes.jsonl"


def write_narrow(demo: Path, folder: Path, steps: Sequence[int], console: Console) -> None:
    """Train the demo's model in Qwen's tokens, and write it with the whole vocabulary."""
    from transformers import AutoProcessor, AutoTokenizer

    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import load_model
    from support.qwen_tokenizer import qwen_tokenizer

    processor: Any = AutoProcessor.from_pretrained(demo)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = processor.chat_template
    for part in ("tokenizer", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(processor, part, tokenizer if part == "tokenizer" else _special(tokenizer, part))
    vocab = CoordVocab.from_tokenizer(tokenizer)
    encoder = PromptEncoder(processor, PROMPT, None)
    image, record = next(scene_records(1, 3, TRAINING_SEED))
    kept = occurring_ids(tokenizer, vocab, encoder.encode(record, image).prompt_token_ids)
    model: Any = load_model(demo, "float32", "packed").model
    set_vocabulary(
        model, compact_rows(model, CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(demo)), vocab, kept)
    )
    new_id = torch.full((len(tokenizer),), -1)
    new_id[kept] = torch.arange(len(kept))
    _set_ids(model.config, lambda part: int(new_id[_special(tokenizer, part)]))
    for phase in range(len(KIND_WEIGHTS)):
        train(model, encoder, vocab, new_id, steps[phase], phase, console)
    # A row that is never a target never wins, and so do its copies.
    whole = model.get_input_embeddings().weight.data[new_id[_special(tokenizer, "vision_start_token_id")]]
    whole = whole.expand(len(tokenizer), -1).clone()
    whole[kept] = model.get_input_embeddings().weight.data
    set_vocabulary(model, whole)
    for config in (model.config, model.generation_config):
        _set_ids(config, lambda part: _special(tokenizer, part))
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>",
}  # fmt: skip


def _special(tokenizer: Any, part: str) -> int:
    return tokenizer.convert_tokens_to_ids(_TOKENS[part])


def _set_ids(config: Any, of: Any) -> None:
    for part in _TOKENS:
        setattr(config, part, of(part))
    if hasattr(config, "text_config"):
        config.text_config.eos_token_id, config.text_config.pad_token_id = config.eos_token_id, config.pad_token_id


def occurring_ids(tokenizer: Any, vocab: CoordVocab, prompt: Sequence[int]) -> torch.Tensor:
    """Ids of prompts, and of all answers that the training scenes can have."""
    names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    found = {*prompt, vocab.eos_id, *vocab.coord_token_ids}
    found |= {_special(tokenizer, part) for part in _TOKENS}
    for name in names:
        for count in SCENES:
            found |= set(vocab.encode(serialize_objects([GTObject(name, "bbox_2d", (1, 2, 3, 4))] * count)))
    return torch.tensor(sorted(found))


def compact_rows(model: Any, old: CoordVocab, vocab: CoordVocab, kept: torch.Tensor) -> torch.Tensor:
    """Embeddings of the kept tokens to begin with: the demo's, the mean if it writes a token as several."""
    rows = model.get_input_embeddings().weight.data
    return torch.stack([rows[old.encode(vocab.pieces[token].decode())].mean(0) for token in kept.tolist()])


def set_vocabulary(model: Any, rows: torch.Tensor) -> None:
    """Give the model these embeddings, which are its head too."""
    embedding = torch.nn.Embedding.from_pretrained(rows, freeze=False)
    model.set_input_embeddings(embedding)
    model.lm_head.weight = embedding.weight
    model.lm_head.out_features = model.config.text_config.vocab_size = len(rows)


def train(
    model: Any,
    encoder: Any,
    vocab: CoordVocab,
    new_id: torch.Tensor,
    steps: int,
    phase: int,
    console: Console,
) -> None:
    """Teach the language model the answers of scenes, one packed row a step. The vision tower stays."""
    model.model.visual.requires_grad_(False)
    model.train()
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(50, steps)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup, 0.02 + 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    streams = {objects: scene_records(3 * steps, objects, TRAINING_SEED + 1000 * phase) for objects in SCENES}
    first_coord, began = int(new_id[vocab.coord_token_ids[0]]), time.perf_counter()
    for step in range(steps):
        row = ROWS[step % len(ROWS)]
        drawn = [next(streams[objects]) for objects, count in row.items() for _ in range(count)]
        inputs, is_answer_L = packed_row(model, encoder, vocab, drawn)
        ids_L = inputs["input_ids"] = new_id[inputs["input_ids"]]
        logits_NV = model(**inputs, use_cache=False).logits[0, :-1][is_answer_L[1:]]
        losses_N, right_N = answer_losses(logits_NV, ids_L[0, 1:][is_answer_L[1:]], first_coord, KIND_WEIGHTS[phase])
        losses_N.mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step % 50 == 1 or step == steps - 1:
            taken = time.perf_counter() - began
            found = f"loss {losses_N.mean():.3f}, text tokens right {right_N.double().mean():.4f}"
            console.print(f"step {step + 1}, {taken:.0f} s: {found}", highlight=False)
    model.eval()


def packed_row(
    model: Any, encoder: Any, vocab: CoordVocab, drawn: Sequence[tuple[Any, ImageRecord]]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a forward over the prompts and answers of ``drawn``, and which of its L tokens are answers."""
    import numpy as np

    from coordexp.modeling.inputs import VisionTower, row_inputs
    from coordexp.targets.build import empty_target

    ids: list[int] = []
    is_answer: list[bool] = []
    segments, offsets, nothing = [], [0], empty_target("")  # of the target, only its tokens matter here
    for image, record in drawn:
        request = encoder.encode(record, image)
        answer = [*vocab.encode_answer(serialize_objects(record.objects)), vocab.eos_id]
        ids += [*request.prompt_token_ids, *answer]
        is_answer += [False] * len(request.prompt_token_ids) + [True] * len(answer)
        offsets.append(len(ids))
        segments.append(Segment(record.sample_id, request.prompt_token_ids, nothing, request.model_inputs))
    row = PackedRow(tuple(segments), np.array(ids), tuple(offsets))
    image_id = _special(encoder.processor.tokenizer, "image_token_id")
    tower = VisionTower.from_model(model)
    inputs = row_inputs(row, model.model.get_rope_index, image_id, "packed", tower)
    return inputs, torch.tensor(is_answer)


def answer_losses(
    logits_NV: torch.Tensor, label_N: torch.Tensor, first_coord: int, kind_weight: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each token, for coordinates against a Gaussian around the right bin, plus ``kind_weight`` times
    that of its kind, coordinate or text; and which text tokens, being the most probable one, are right."""
    is_coord_N = (label_N >= first_coord) & (label_N < first_coord + NUM_BINS)
    log_p_NV = F.log_softmax(logits_NV, dim=-1)
    losses_N = F.nll_loss(log_p_NV, label_N, reduction="none")
    bins_K = label_N[is_coord_N] - first_coord
    near_KB = torch.softmax(-((torch.arange(NUM_BINS) - bins_K[:, None]) ** 2) / (2 * SIGMA**2), dim=-1)
    coords_KB = log_p_NV[is_coord_N, first_coord : first_coord + NUM_BINS]
    losses_N = losses_N.masked_scatter(is_coord_N, -(near_KB * coords_KB).sum(-1))
    of_coords_N = log_p_NV[:, first_coord : first_coord + NUM_BINS].logsumexp(-1)
    of_text_N = torch.cat((log_p_NV[:, :first_coord], log_p_NV[:, first_coord + NUM_BINS :]), dim=-1).logsumexp(-1)
    losses_N = losses_N - kind_weight * torch.where(is_coord_N, of_coords_N, of_text_N)
    return losses_N, (logits_NV.argmax(-1) == label_N)[~is_coord_N]


def write_wide(narrow: Path, folder: Path, width: Width) -> None:
    """Widen the checkpoint ``narrow``; its card has the prompt that the model learned."""
    import shutil

    from coordexp.checkpoints.card import CARD
    from coordexp.data.files import asset
    from coordexp.modeling.load import load_model

    wide = widened(load_model(narrow, "float32").model, width).bfloat16()
    shutil.copytree(narrow, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    wide.save_pretrained(folder, max_shard_size="100GB")
    shutil.copy(asset(f"checkpoints/demo-stage1/{CARD}"), folder / CARD)


if __name__ == "__main__":
    main()
