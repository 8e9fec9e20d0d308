"""The real trainer on small models: packed rows against separate forwards, several processes against one, and bfloat16
against float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from coordexp import distributed
from coordexp.doctor.check import Row, Settings, compared, judged, measured
from coordexp.doctor.exactness import NO_OFFLOAD, ROW_LIMIT, offload_of, packed_row_error
from coordexp.doctor.samples import config_of, first_step, trainer_of
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.offload import held_by

MODELS = ("tied", "untied")  # by their language heads
GRADIENT_LIMIT = 1e-2  # a gradient that is not exchanged is off by about 1
COSINE_LIMIT = 2e-2  # 1 - cosine of bfloat16's gradient to float32's


def packing(settings: Settings) -> Iterator[Row]:
    """A packed row against its segments alone, through the whole model."""
    trainer = _trainer(settings, "tied")
    segments, model = first_step(trainer)[0].segments, trainer.model
    advice = "do not train with training.packing: true; report this table"
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        error = packed_row_error(trainer.run.loaded, segments, trainer.run.accelerator.device)
        note = f"logits of a row of {len(segments)} segments"
        yield compared(f"packed = separate, {str(dtype)[6:]}", error, ROW_LIMIT[dtype], advice, note)


def reference(settings: Settings) -> Iterator[Row]:
    """The gradient of a step of one process, for the checks of several."""
    for head in MODELS:
        trainer = _trainer(settings, head)
        first_step(trainer)
        save_file(_gradients(trainer), _gradient_file(settings, head))
    where = "a GPU" if torch.cuda.is_available() else "the CPU"
    yield measured("one process", f"gradients of a step on {where}, with which those of several are compared")


def optimizer_states(settings: Settings) -> Iterator[Row]:
    """Whether master weights and the optimizer's states are on the device that computes, after a step as shipped."""
    config = config_of(
        settings, "stage1/sft.yaml", settings.folder / MODELS[0], "scenes",
        global_max_length=4096, training__use_cpu=not torch.cuda.is_available(), training__max_steps=1,
        training__effective_batch_size=8, rollout_matching__max_new_tokens=256,
    )  # fmt: skip
    trainer = trainer_of(config)
    first_step(trainer)
    trainer.step.update()
    device = next(trainer.model.parameters()).device
    held = [tensor for tensor in held_by(trainer.run.optimizer.optimizer) if tensor.dim()]
    elsewhere = sum(tensor.device != device for tensor in held) + (device.type != trainer.run.accelerator.device.type)
    figure = f"{len(held) - elsewhere} of {len(held)} tensors on {device}, {config.training.master_weights} masters"
    advice = "set training.master_weights: null, and report this table"
    yield judged("optimizer states", bool(held) and not elsewhere, figure, advice)


def gradients(settings: Settings, parallel: str) -> Iterator[Row]:
    """The gradient of a step of several processes against that of one; with DDP also after the model was offloaded."""
    by = f"{distributed.world_size()} processes on {'GPUs, NCCL' if torch.cuda.is_available() else 'CPUs, gloo'}"
    key = "fsdp.enabled: true" if parallel == "FSDP2" else "several processes"
    for head in MODELS:
        trainer, expected = _trainer(settings, head, parallel), load_file(_gradient_file(settings, head))
        first_step(trainer)
        error, advice = _furthest(_gradients(trainer), expected), f"do not train with {key}; report this table"
        yield compared(f"{parallel}, {head} head", error, GRADIENT_LIMIT, advice, by)
        if parallel == "DDP" and head == MODELS[-1]:
            trainer.model.zero_grad()
            offload = offload_of(trainer.model, trainer.run.accelerator.device)
            offload.optimizer = lambda optimizer=trainer.run.optimizer: optimizer
            with offload.away():
                pass
            first_step(trainer)
            yield compared(
                "DDP after offload", _furthest(_gradients(trainer), expected), GRADIENT_LIMIT, NO_OFFLOAD, by
            )


def scores(settings: Settings, parallel: str) -> Iterator[Row]:
    """With ``training.bf16`` the head's scores are float32 all the same, and the gradient is near float32's."""
    trainer = _trainer(settings, "tied", parallel, half=True)
    (row, *_), step, run = first_step(trainer), trainer.step, trainer.run
    ours = _gradients(trainer)  # before the next forward, for which FSDP gathers weights that have none
    objective = step.task_of(0).objective
    inputs = step.build_row(row, objective).to(run.accelerator.device)
    with torch.no_grad():
        (found,) = run.model(forward_fn=partial(objective.scores, row=inputs))
    tensors = (*found.vocab_lse_N.values(), found.label_logit_N, *found.coord_lse_N.values())
    types = {str(one.dtype)[6:] for one in tensors}
    expected = load_file(_gradient_file(settings, "tied"))
    a, b = (torch.cat([named[name].flatten().double() for name in expected]) for named in (ours, expected))
    error = 1 - float(torch.cosine_similarity(a, b, dim=0))
    note = f"1 - cosine of the gradient to float32's; scores are {', '.join(types)}"
    advice = "train with training.bf16: false, and report this table"
    result = compared(f"scores, {parallel}", error, COSINE_LIMIT, advice, note)
    yield result if types == {"float32"} else replace(result, result="failed")


def _trainer(settings: Settings, head: str, parallel: str = "", *, half: bool = False) -> CoordExpTrainer:
    total = 4 * settings.ranks  # samples of the one step, over all processes
    config = config_of(
        settings, "stage1/sft.yaml", settings.folder / head, "scenes",
        model__dtype="float32", global_max_length=512 * total, training__bf16=half, training__master_weights=None,
        training__use_cpu=not torch.cuda.is_available(), training__optim="adamw_torch", training__max_steps=1,
        training__effective_batch_size=total, fsdp__enabled=parallel == "FSDP2",
        training__per_device_train_batch_size=total // distributed.world_size(),
    )  # fmt: skip
    return trainer_of(config)


def _gradients(trainer: CoordExpTrainer) -> dict[str, torch.Tensor]:
    """Whole gradients on the CPU; a collective call under FSDP."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name] = whole.float().cpu().contiguous()
    return found


def _gradient_file(settings: Settings, head: str) -> Path:
    return settings.folder / f"gradients-{head}.safetensors"


def _furthest(ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference on any rank, by the largest gradient."""
    scale = max(float(value.abs().max()) for value in expected.values())
    largest = max(float((ours[name] - value).abs().max()) for name, value in expected.items()) / scale
    return distributed.all_reduce([largest], "max")[0]
