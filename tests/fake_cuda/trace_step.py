"""One optimizer step of the real trainer code at Qwen3-VL's real sizes, on a fake GPU, and its work there.

    python tests/fake_cuda/trace_step.py --size 2B                               rollout matching
    python tests/fake_cuda/trace_step.py --file stage1/sft.yaml --size 2B        a shipped file, as make fake-gpu does

Real: the configuration, targets, packed rows, ``TrainStep``, forward, chunked head, objective, backward with autocast
and checkpointing, clipping, master weights, fused AdamW. Fake: the device's memory and values. Memory is what
torch's allocator would hold, without fragmentation.
"""

from __future__ import annotations

import fake_cuda  # isort: skip  # noqa: F401  # before torch

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from device_trace import PEAK, DeviceTrace
from fake_kernels import FAKE_KERNELS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from transformers import TrainingArguments
from transformers.initialization import no_init_weights

from coordexp.checkpoints.memory import estimate_memory, recomputed_every
from coordexp.config import RunConfig, load_config, parse_config, resolved_rollout
from coordexp.coords import FieldOrder
from coordexp.data.dataset import Sample
from coordexp.data.files import asset
from coordexp.doctor.runs import product_flops
from coordexp.modeling.adapter import tune
from coordexp.modeling.attention import recompute_layers, transformers_names
from coordexp.modeling.inputs import VisionTower
from coordexp.modeling.kernels import fuse_layers
from coordexp.modeling.load import Qwen3VLForConditionalGeneration
from coordexp.modeling.patches import PixelScale
from coordexp.packing import CarryBuffer
from coordexp.recording.writer import RolloutLog
from coordexp.records import GTObject, ImageRecord, RolloutRequest
from coordexp.targets import build_gt_target
from coordexp.training.optimizer import LearningRates, build_optimizer, build_scheduler
from coordexp.training.rows import RowBuilder
from coordexp.training.step import TrainStep
from coordexp.training.tasks import build_tasks
from support.config_samples import stage2, two_channel
from support.qwen_sizes import IMAGE_TOKEN, VISION_END, VISION_START, qwen3_vl_config
from support.qwen_tokenizer import qwen_vocab

CUDA = torch.device("cuda", 0)
GPU_BYTES = 85e9  # of an H100 with 80 GB
NAMES = ("person", "bicycle", "traffic light", "fire hydrant", "dining table", "cell phone", "potted plant", "dog")
PROMPT_BEFORE = [151_644, 8948, 198, *[2610] * 40, VISION_START]
PROMPT_AFTER = [VISION_END, *[785] * 30, 151_645, 198, 151_644, 77_091, 198]


def run_config(flags: argparse.Namespace) -> RunConfig:
    """The shipped file ``--file``, or rollout matching by few keys; with the flags on top."""
    every = 1 if flags.checkpoint_every is None else flags.checkpoint_every
    if flags.file is not None:
        keys: dict[str, Any] = {"global_max_length": flags.length, "model.fused_kernels": flags.fused}
        if flags.checkpoint_every is not None:
            keys |= {"training.gradient_checkpointing": every > 0, "training.gradient_checkpointing_every": every or 1}
        return load_config(asset(f"configs/{flags.file}"), keys)
    content = two_channel() if flags.channel_a else stage2()
    content["global_max_length"] = flags.length
    content["model"] = {**content["model"], "dtype": "bfloat16", "fused_kernels": flags.fused}
    content["tuner"] = {"train_type": "full"}
    if flags.lora:
        content["tuner"] = {"train_type": "lora", "lora_rank": 16, "lora_alpha": 32, "freeze_vit": flags.freeze_vit}
    content["training"] |= {
        "bf16": True, "gradient_checkpointing": every > 0, "gradient_checkpointing_every": every or 1,
        "optim": "adamw_torch_fused", "master_weights": None if flags.lora else "float32", "max_grad_norm": 1.0,
        "learning_rate": 1e-5,
    }  # fmt: skip
    return parse_config(content)


def samples_of(flags: argparse.Namespace, vocab: Any, field_order: FieldOrder) -> list[Sample]:
    """Samples whose segments fill a row of ``flags.length`` tokens."""
    width, height = flags.image
    grid = torch.tensor([[1, height // 16, width // 16]])
    patches = int(grid[0, 1] * grid[0, 2])
    inputs = {"pixel_values": torch.zeros(patches, 3 * 16 * 16, dtype=torch.uint8), "image_grid_thw": grid}
    prompt = (*PROMPT_BEFORE, *[IMAGE_TOKEN] * (patches // 4), *PROMPT_AFTER)
    generator = np.random.default_rng(0)
    samples: list[Sample] = []
    total = 0
    while True:
        name = str(len(samples))
        corners = generator.integers(0, 900, (flags.objects, 2)).tolist()
        objects = tuple(GTObject(str(generator.choice(NAMES)), "bbox_2d", (x, y, x + 50, y + 60)) for x, y in corners)
        target = build_gt_target(objects, vocab, sample_id=name, field_order=field_order)
        total += len(prompt) + len(target.token_ids)
        if total > flags.length:
            return samples
        record = ImageRecord(name, Path("no.jpg"), width, height, objects)
        samples.append(Sample(record, RolloutRequest(name, record.image, (), prompt, inputs)))


class OneFakeGPU:
    """accelerate's part on one GPU in bfloat16."""

    device, state, optimizer_step_was_skipped, sync_gradients = CUDA, SimpleNamespace(), False, True

    def no_sync(self, model: Any) -> Any:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Any, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(list(parameters), norm)


def fake_model(config: RunConfig, shape: Any, coord_ids: Any) -> tuple[Any, dict[str, tuple[int, ...]], int]:
    """The tuned model as the trainer prepares it, the shapes of the checkpoint's weights, and which of the layers are
    recomputed: every n-th, 0: none."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(CUDA), no_init_weights():
        model: Any = Qwen3VLForConditionalGeneration(shape)
    torch.set_default_dtype(torch.float32)
    model.tie_weights()
    model.model.pixel_scale = PixelScale((127.5,) * 3, (127.5,) * 3, frames=2)
    model.train()
    model.set_attn_implementation(transformers_names("packed"))
    for module in model.modules():  # from_pretrained leaves rotary frequencies in float32
        for name, value in list(module._buffers.items()):
            if value is not None and "inv_freq" in name:
                module._buffers[name] = value.float()
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    # peft moves each adapter to its layer's device, which fake tensors cannot do; they are there already.
    with torch.device(CUDA), patch.object(torch.nn.Module, "to", lambda self, *_, **__: self):
        tune(model, config.tuner, coord_ids)
    if config.model.fused_kernels is True:
        fuse_layers(model, FAKE_KERNELS)
    every = (
        recomputed_every(config, shape.to_dict(), shapes, 1, GPU_BYTES) if config.training.gradient_checkpointing else 0
    )
    recompute_layers(model, every)
    return model, shapes, every


def step_of(config: RunConfig, args: Any, model: Any, task: Any, folder: Path) -> TrainStep:
    rates = LearningRates(config.training.learning_rate)
    optimizer = build_optimizer(model, args, rates, master_weights=config.training.master_weights is not None)

    def wrapped(**arguments: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(**arguments)

    wrapped.train, wrapped.parameters = model.train, model.parameters  # pyright: ignore[reportFunctionMemberAccess]
    run: Any = SimpleNamespace(
        model=wrapped, optimizer=optimizer, scheduler=build_scheduler(optimizer, args, 10),
        accelerator=OneFakeGPU(), shards=False, is_deepspeed=False,
        together=lambda where: nullcontext(lambda: None),
        progress=SimpleNamespace(global_step=0),
        sums=SimpleNamespace(add=lambda metrics: None, count_step=lambda channel, has_slots: None),
    )  # fmt: skip
    tower = VisionTower.from_model(model)
    build_row = RowBuilder(model.model.get_rope_index, tower, IMAGE_TOKEN, "packed", torch.device("cpu"))
    log = RolloutLog(folder, 0)
    return TrainStep(run, {None: task}, None, build_row=build_row, max_grad_norm=1.0, rollout_log=log)


def trace(flags: argparse.Namespace) -> dict[str, Any]:
    """Two steps; the figures are the second's, which has its optimizer state. The first has one row."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    vocab, config = qwen_vocab(), run_config(flags)
    rollout: Any = resolved_rollout(config)
    buffer = CarryBuffer(config.global_max_length, config.training.packing_buffer)
    no_backend: Any = None
    tasks, _ = build_tasks(config, rollout, vocab, no_backend, buffer)
    task = replace(tasks["A" if flags.channel_a else None], rollouts=None)  # answers are written from ground truth
    samples = samples_of(flags, vocab, config.custom.object_field_order)
    shape = qwen3_vl_config(flags.size, flags.layers)
    targets = [task.targets.ground_truth(one) for one in samples]
    tokens = [len(one.request.prompt_token_ids) for one in samples]
    lengths = tuple(a + len(b.token_ids) for a, b in zip(tokens, targets, strict=True))
    grids = tuple(len(one.request.model_inputs["pixel_values"]) for one in samples)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = DeviceTrace(fake, {sum(lengths): lengths, sum(grids): grids}, sum(grids) // 4)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            **{**config.training.hf_arguments(), "output_dir": folder, "bf16": False, "use_cpu": True}
        )
        with fake, device, patch.object(_foreach_utils, "_foreach_supported_types", [torch.Tensor, FakeTensor]):
            model, shapes, every = fake_model(config, shape, vocab.coord_token_ids)
            step = step_of(config, args, model, task, Path(folder))
            for number, rows in enumerate((1, flags.rows)):
                read: Any = SimpleNamespace(take=lambda rows=rows: [samples] * rows, peek=lambda: None)
                device.restart()
                step.accumulate(read, number)
                device.updates = True
                step.update()
                device.updates = False
    totals, done = device.totals, sum(lengths) * flags.rows
    chosen = {"gradient_checkpointing": every > 0, "gradient_checkpointing_every": max(1, every)}
    config = config.model_copy(update={"training": config.training.model_copy(update=chosen)})
    supervised = sum(int(np.any(list(one.weights.values()), axis=0).sum()) for one in targets)
    useful = product_flops(
        config.tuner, shape.to_dict(), shapes, tokens=done, patches=sum(grids) * flags.rows,
        supervised=supervised * flags.rows,
    )  # fmt: skip
    attended = sum(part.flops for name, part in device.parts.items() if name.startswith("attention"))
    attended -= device.parts["attention, recomputed"].flops
    return {
        "size": flags.size, "layers": flags.layers, "file": flags.file, "channel_a": flags.channel_a,
        "lora": config.tuner.train_type == "lora", "fused": flags.fused,
        "checkpoint_every": every,
        "length": flags.length, "rows": flags.rows, "image": flags.image, "objects": flags.objects, "tokens": done,
        "peak_gb": device.peak / 1e9, "estimate_gb": estimate_memory(config, shape.to_dict(), shapes).total / 1e9,
        "kernels": totals.kernels, "tflop": totals.flops / 1e12, "gb_moved": totals.bytes / 1e9,
        "least_s": totals.seconds, "tokens_per_s": done / totals.seconds, "mfu": useful / totals.seconds / PEAK,
        "mfu_with_attention": (useful + attended) / totals.seconds / PEAK,
        "parts": {name: vars(part) for name, part in sorted(device.parts.items())}, "waits": dict(device.waits),
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "transformers": transformers.__version__,
        "traced_s": time.perf_counter() - started,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--size", choices=("2B", "4B", "8B"), default="2B")
    flags.add_argument("--layers", type=int, help="of the language model, instead of all")
    flags.add_argument("--lora", action="store_true")
    flags.add_argument("--freeze-vit", action="store_true")
    flags.add_argument("--channel-a", action="store_true", help="Channel-A instead of rollout matching")
    flags.add_argument("--file", help="below configs, such as stage1/sft.yaml, instead of the flags above")
    flags.add_argument(
        "--checkpoint-every", type=int, help="checkpoint every n-th layer, 0 for none [1, or the file's]"
    )
    flags.add_argument("--fused", action="store_true", help="model.fused_kernels, by stand-ins of the same traffic")
    flags.add_argument("--length", type=int, default=12_000, help="tokens of a packed row [12000]")
    flags.add_argument("--rows", type=int, default=1, help="rows of a step [1]")
    flags.add_argument("--image", type=int, nargs=2, default=[1024, 768], metavar=("WIDTH", "HEIGHT"))
    flags.add_argument("--objects", type=int, default=20, help="of an image [20]")
    flags.add_argument("--json", type=Path, help="append the figures as a line")
    options = flags.parse_args(arguments)
    found = trace(options)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    print(
        f"{options.size} {'LoRA' if found['lora'] else 'full'}{' Channel-A' if options.channel_a else ''}"
        f"{' fused' if options.fused else ''}, every {found['checkpoint_every']}: "
        f"peak {found['peak_gb']:.1f} GB (estimate {found['estimate_gb']:.1f}), "
        f"{found['kernels']} kernels, {found['tflop']:.0f} TFLOP, {found['gb_moved']:.0f} GB moved, "
        f"least time on an H100 {found['least_s']:.3f} s = {found['tokens_per_s']:.0f} tokens/s, "
        f"MFU {found['mfu']:.3f}, "
        f"with attention {found['mfu_with_attention']:.3f}; traced in {found['traced_s']:.0f} s"
    )
    for name, part in found["parts"].items():
        print(
            f"  {name:26} {part['kernels']:6} kernels {part['bytes'] / 1e9:7.0f} GB {part['flops'] / 1e12:5.0f} TFLOP "
            f"{1e3 * part['seconds']:6.1f} ms"
        )
    print("  the host waits: " + "; ".join(f"{place} {count}" for place, count in found["waits"].items() if count))


if __name__ == "__main__":
    main()
