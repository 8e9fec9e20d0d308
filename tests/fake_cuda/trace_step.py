"""One optimizer step of the real trainer code at Qwen3-VL's real sizes, on a fake GPU: what it would do there.

    python tests/fake_cuda/trace_step.py --size 2B            make fake-gpu: whole 2B, 4B and 8B

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
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from device_trace import PEAK, DeviceTrace
from fake_kernels import FAKE_KERNELS
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import TrainingArguments
from transformers.initialization import no_init_weights

from coordexp.checkpoints.memory import estimate_memory
from coordexp.config import RunConfig, parse_config, resolved_rollout
from coordexp.coords import FieldOrder
from coordexp.data.dataset import Sample
from coordexp.modeling.adapter import tune
from coordexp.modeling.attention import transformers_names
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
NAMES = ("person", "bicycle", "traffic light", "fire hydrant", "dining table", "cell phone", "potted plant", "dog")
OBJECTS, IMAGE = 20, (1024, 768)
PROMPT_BEFORE = [151_644, 8948, 198, *[2610] * 40, VISION_START]
PROMPT_AFTER = [VISION_END, *[785] * 30, 151_645, 198, 151_644, 77_091, 198]


def run_config(flags: argparse.Namespace) -> RunConfig:
    content = two_channel() if flags.channel_a else stage2()
    content["global_max_length"] = flags.length
    content["model"] = {**content["model"], "dtype": "bfloat16", "fused_kernels": flags.fused}
    content["tuner"] = {"train_type": "full"}
    if flags.lora:
        content["tuner"] = {"train_type": "lora", "lora_rank": 16, "lora_alpha": 32, "freeze_vit": flags.freeze_vit}
    content["training"] |= {
        "bf16": True, "gradient_checkpointing": not flags.no_checkpointing,
        "gradient_checkpointing_every": flags.checkpoint_every, "optim": "adamw_torch_fused",
        "master_weights": None if flags.lora else "float32", "max_grad_norm": 1.0, "learning_rate": 1e-5,
    }  # fmt: skip
    return parse_config(content)


def samples_of(length: int, vocab: Any, field_order: FieldOrder) -> list[Sample]:
    """Samples whose segments fill a row of ``length`` tokens."""
    width, height = IMAGE
    grid = torch.tensor([[1, height // 16, width // 16]])
    patches = int(grid[0, 1] * grid[0, 2])
    inputs = {"pixel_values": torch.zeros(patches, 3 * 16 * 16, dtype=torch.uint8), "image_grid_thw": grid}
    prompt = (*PROMPT_BEFORE, *[IMAGE_TOKEN] * (patches // 4), *PROMPT_AFTER)
    generator = np.random.default_rng(0)
    samples: list[Sample] = []
    total = 0
    while True:
        name = str(len(samples))
        corners = generator.integers(0, 900, (OBJECTS, 2)).tolist()
        objects = tuple(GTObject(str(generator.choice(NAMES)), "bbox_2d", (x, y, x + 50, y + 60)) for x, y in corners)
        target = build_gt_target(objects, vocab, sample_id=name, field_order=field_order)
        total += len(prompt) + len(target.token_ids)
        if total > length:
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


def trace(flags: argparse.Namespace) -> dict[str, Any]:
    """Two steps; the figures are the second's, which has its optimizer state."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    vocab, config = qwen_vocab(), run_config(flags)
    rollout: Any = resolved_rollout(config)
    buffer = CarryBuffer(config.global_max_length, config.training.packing_buffer)
    no_backend: Any = None
    tasks, _ = build_tasks(config, rollout, vocab, no_backend, buffer)
    task = replace(tasks["A" if flags.channel_a else None], rollouts=None)  # answers are written from ground truth
    samples = samples_of(flags.length, vocab, config.custom.object_field_order)
    shape = qwen3_vl_config(flags.size, flags.layers)
    tokens = [len(one.request.prompt_token_ids) for one in samples]
    targets = [len(task.targets.ground_truth(one).token_ids) for one in samples]
    lengths = tuple(a + b for a, b in zip(tokens, targets, strict=True))
    grids = tuple(len(one.request.model_inputs["pixel_values"]) for one in samples)
    images = sum(grids) // 4
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = DeviceTrace(fake, {sum(lengths): lengths, sum(grids): grids}, images)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            **{**config.training.hf_arguments(), "output_dir": folder, "bf16": False, "use_cpu": True}
        )
        with fake, device:
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
                tune(model, config.tuner, vocab.coord_token_ids)
            if flags.fused:
                fuse_layers(model, FAKE_KERNELS)
            if config.training.gradient_checkpointing:
                model.gradient_checkpointing_enable(None, every_n_layers=config.training.gradient_checkpointing_every)
            rates = LearningRates(config.training.learning_rate)
            masters = config.training.master_weights is not None
            optimizer = build_optimizer(model, args, rates, master_weights=masters)

            def wrapped(**arguments: Any) -> Any:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return model(**arguments)

            wrapped.train, wrapped.parameters = model.train, model.parameters  # pyright: ignore[reportFunctionMemberAccess]
            run: Any = SimpleNamespace(
                model=wrapped, optimizer=optimizer, scheduler=build_scheduler(optimizer, args, 10),
                accelerator=OneFakeGPU(), shards=False, progress=SimpleNamespace(global_step=0),
                sums=SimpleNamespace(add=lambda metrics: None, count_step=lambda channel: None),
            )  # fmt: skip
            build_row = RowBuilder(
                model.model.get_rope_index, VisionTower.from_model(model), IMAGE_TOKEN, "packed", torch.device("cpu"),
            )  # fmt: skip
            step = TrainStep(
                run, {None: task}, None, build_row=build_row, max_grad_norm=1.0, rollout_log=RolloutLog(Path(folder), 0)
            )
            read: Any = SimpleNamespace(take=lambda: [samples] * flags.rows, peek=lambda: None)
            for number in range(2):
                device.restart()
                step.accumulate(read, number)
                device.updates = True
                step.update()
                device.updates = False
    totals, done = device.totals, sum(lengths) * flags.rows
    estimate = estimate_memory(config, shape.to_dict(), shapes)
    return {
        "size": flags.size, "layers": flags.layers, "lora": flags.lora, "channel_a": flags.channel_a,
        "fused": flags.fused, "checkpoint_every": 0 if flags.no_checkpointing else flags.checkpoint_every,
        "length": flags.length, "rows": flags.rows, "tokens": done,
        "peak_gb": device.peak / 1e9, "estimate_gb": estimate.total / 1e9,
        "kernels": totals.kernels, "tflop": totals.flops / 1e12, "gb_moved": totals.bytes / 1e9,
        "roofline_s": totals.seconds, "tokens_per_s": done / totals.seconds,
        "parts": {name: vars(part) for name, part in sorted(device.parts.items())},
        "share_of_peak": totals.flops / totals.seconds / PEAK, "traced_s": time.perf_counter() - started,
    }  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--size", choices=("2B", "4B", "8B"), default="2B")
    flags.add_argument("--layers", type=int, help="of the language model, instead of all")
    flags.add_argument("--lora", action="store_true")
    flags.add_argument("--freeze-vit", action="store_true")
    flags.add_argument("--channel-a", action="store_true", help="Channel-A instead of rollout matching")
    flags.add_argument("--no-checkpointing", action="store_true")
    flags.add_argument("--checkpoint-every", type=int, default=1, help="checkpoint every n-th layer [1]")
    flags.add_argument("--fused", action="store_true", help="model.fused_kernels, by stand-ins of the same traffic")
    flags.add_argument("--length", type=int, default=12_000, help="tokens of a packed row [12000]")
    flags.add_argument("--rows", type=int, default=1, help="rows of a step [1]")
    flags.add_argument("--json", type=Path, help="append the figures as a line")
    options = flags.parse_args()
    found = trace(options)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    print(
        f"{options.size} {'LoRA' if options.lora else 'full'}{' Channel-A' if options.channel_a else ''}"
        f"{' fused' if options.fused else ''}: "
        f"peak {found['peak_gb']:.1f} GB (estimate {found['estimate_gb']:.1f}), "
        f"{found['kernels']} kernels, {found['tflop']:.0f} TFLOP, {found['gb_moved']:.0f} GB moved, "
        f"roofline of an H100 {found['roofline_s']:.2f} s = {found['tokens_per_s']:.0f} tokens/s, "
        f"{found['share_of_peak']:.2f} of its peak; traced in {found['traced_s']:.0f} s"
    )
    for name, part in found["parts"].items():
        print(
            f"  {name:26} {part['kernels']:6} kernels {part['bytes'] / 1e9:7.0f} GB {part['flops'] / 1e12:5.0f} TFLOP "
            f"{1e3 * part['seconds']:6.0f} ms"
        )


if __name__ == "__main__":
    main()
