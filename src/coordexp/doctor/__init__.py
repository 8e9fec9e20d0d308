"""``coordexp doctor``: whether training, pushes and answers are exact on this machine, and how fast they are.

Each check runs in a process of its own (:mod:`coordexp.doctor.check`); the table below imports nothing that it names.
"""

from __future__ import annotations

from coordexp.doctor.check import Check, Row, Settings, diagnose, select

__all__ = ["CHECKS", "SECTIONS", "Check", "Row", "Settings", "diagnose", "select"]

SECTIONS = ("machine", "exactness", "pushes", "answers", "throughput")


def _rows(**sections: tuple[str, ...]) -> dict[str, str]:
    return {name: section for section, names in sections.items() for name in names}


def _at_once(what: str) -> tuple[str, ...]:
    return tuple(f"{what}, {count} at once" for count in (1, 8, 64))


CHECKS = (
    Check(
        "machine",
        _rows(machine=("python", "versions", "GPUs", "GPU memory", "P2P")),
        ".machine:machine", needs=None,
    ),
    Check("NCCL", _rows(machine=("NCCL",)), ".machine:nccl_versions", needs=None),
    Check("host", _rows(machine=("host memory", "memlock", "/dev/shm")), ".machine:host", needs=None),
    Check("packages", _rows(machine=("liger-kernel", "flashinfer", "flash-attn")), ".machine:packages", needs=None),
    Check("models", _rows(machine=("models",)), ".samples:models", needs=None),
    Check(
        "kernels",
        _rows(exactness=(
            "attention: packed, float32", "attention: packed, bfloat16", "attention: varlen, bfloat16",
            "attention: flash, bfloat16", "fused kernels, bfloat16", "language head, scores",
            "language head, gradients", "offload and back",
        )),
        ".exactness:kernels",
    ),
    Check(
        "packing",
        _rows(exactness=("packed = separate, float32", "packed = separate, bfloat16")),
        ".gradients:packing",
    ),
    Check("optimizer", _rows(exactness=("optimizer states",)), ".gradients:optimizer_states"),
    Check("one", _rows(exactness=("one process",)), ".gradients:reference", ranks=1),
    Check("autocast", _rows(exactness=("scores, autocast",)), ".gradients:scores", ("autocast",), needs="one"),
    Check(
        "ddp",
        _rows(exactness=("DDP, tied head", "DDP, untied head", "DDP after offload")),
        ".gradients:gradients", ("DDP",), ranks=0, needs="one",
    ),
    Check("ddp-bf16", _rows(exactness=("scores, DDP",)), ".gradients:scores", ("DDP",), ranks=0, needs="one"),
    Check(
        "fsdp2",
        _rows(exactness=("FSDP2, tied head", "FSDP2, untied head")),
        ".gradients:gradients", ("FSDP2",), ranks=0, needs="one",
    ),
    Check("fsdp2-bf16", _rows(exactness=("scores, FSDP2",)), ".gradients:scores", ("FSDP2",), ranks=0, needs="one"),
    Check(
        "engine",
        _rows(
            pushes=("engine", "ten pushes, full", "ten pushes, LoRA merged", "sleep and wake", "sleep and wake, LoRA"),
            answers=("pixels, first layer", "vLLM = transformers"),
            throughput=(*_at_once("decoding"), "push"),
        ),
        ".engine:colocated", uses_vllm=True,
    ),
    Check(
        "skipping",
        _rows(
            pushes=("engine, skipping",),
            answers=("skipping = transformers",),
            throughput=(*_at_once("skipping"), "skip_forced_tokens"),
        ),
        ".engine:skipping", uses_vllm=True,
    ),
    Check(
        "tensor-parallel",
        _rows(pushes=("TP 2: ten pushes",), answers=("TP 2: vLLM = transformers",)),
        ".engine:tensor_parallel", ranks=2, gpus=2, uses_vllm=True,
    ),
    Check("server", _rows(pushes=("server: ten pushes",)), ".engine:served", gpus=2, uses_vllm=True),
    Check(
        "training",
        _rows(throughput=("training", "parts of a step", "loader processes", "arithmetic", "peak memory")),
        ".throughput:training",
    ),
    Check("stage-2", _rows(throughput=("stage 2", "parts of a stage 2 step")), ".throughput:stage_2"),
)  # fmt: skip
