"""``coordexp init``: the shipped configuration of a stage with values for this data, model and machine. Torch-free."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from PIL.Image import Resampling

from coordexp.checkpoints.card import Card, Training, read_card
from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.folder import Checkpoint, processor_rule, read_object
from coordexp.checkpoints.memory import ASLEEP, MemoryEstimate, estimate_memory
from coordexp.checkpoints.run_folder import STATE
from coordexp.config import parse_config
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.coords import serialize_objects
from coordexp.data.files import asset
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import METRICS
from coordexp.reading import parse_yaml
from coordexp.records import ImageRecord

Stage = Literal[1, 2]
_TEMPLATES: Mapping[Stage, str] = {1: "configs/stage1/sft.yaml", 2: "configs/stage2_rollout_aligned/base.yaml"}
_RECIPE = "configs/stage2_rollout_aligned/parts/rewritten_target.yaml"  # replaces base.yaml's keys of the same names
_KEPT = ("template.system", "template.prompt", "custom.object_field_order", "custom.object_ordering")
_SCHEMA = "configs/coordexp.schema.json"
_CHAT_TOKENS = 32  # of the chat template around prompt and answer, generously
_COUNTED = 1000  # samples whose tokens are counted: those with the longest texts
_ROW = 12_000  # tokens of a packed row, where neither data nor model say otherwise
_ADAPTERS = "configs/stage1/lora.yaml"
_ADAPTER_RATE = 5  # learning rate of adapters, by that of all weights: lora.yaml's by sft.yaml's
_LARGE = 100_000_000  # parameters from which memory matters more than a third of the time, also on a CPU
# The templates' rates are for 2B to 8B parameters. Below _LARGE: (learning rate, the file in which 4 M have it).
_SMALL: Mapping[Stage, tuple[float, str]] = {
    1: (5e-4, "configs/bccd/stage1.yaml"),
    2: (2e-4, "configs/demo/stage2.yaml"),
}
_SMALL_SIGMA = 8.0  # bins, in both
_SEEN = 2000  # photos times epochs from which small data is learned (docs/quickstart.md)
_MOST_EPOCHS = 200
_MISSES_MOST = 0.5  # recall below which stage 2 is not recommended
_FILLED = 0.95  # of a row, on average, by the samples of a micro-step
_TYPICAL = 200  # samples whose answers are counted for their mean
_TIMED = 7  # photos that are read to learn how long it takes
_FLOP_PER_S = 0.4 * 989e12  # of an H100 in training, at best
_ROW_S = 6000 * 4e-6  # least seconds of a packed row: a GPU is sent 6,000 kernels, as the profile of 2B counted
_CROWD = 6.0  # objects per image, on average, from which the study's recipe for crowds is better
_USABLE = 0.85  # of a GPU's memory: the rest is CUDA's and fragmentation
_ROOMY = 0.8  # the same, where more would only save time: the estimate may be 10 % wrong
_ENGINE_LEAST = 6_000_000_000  # bytes that an engine needs next to its weights: activations, cache, CUDA graphs
_ENGINE_MOST = 0.6  # of a GPU's memory: enough cache for decode_batch_size answers


@dataclass(frozen=True, slots=True)
class DataAtHand:
    """The dataset of a run. Samples and answers: approximate numbers of tokens. ``photos``: a few, with the
    size to which the processor resizes them. ``notes``: what does not fit the model."""

    train: Path
    val: Path | None
    images: int
    objects: int
    classes: int
    longest_sample: int
    longest_answer: int
    mean_sample: float
    mean_answer: float
    positions: int
    photos: tuple[tuple[Path, tuple[int, int]], ...]
    notes: tuple[str, ...] = ()


def look_at(data: Path, model: Path, val: Path | None = None) -> DataAtHand:
    """Read a dataset and the checkpoint's small files. ``data``: a JSONL, or a folder with ``train.jsonl`` (and
    ``val.jsonl``) as converters write it, or NAME.train.jsonl and NAME.val.jsonl as data split does; ``val``: JSONL to
    evaluate on [the one next to it]."""
    train = data
    if data.is_dir():
        train = data / "train.jsonl"
        if not train.is_file():
            files = sorted(data.glob("*.train.jsonl")) or sorted(data.glob("*.jsonl"))  # as data split names them
            if len(files) != 1:
                names = ", ".join(path.name for path in files[:5]) or "none"
                raise DataError(f"has no train.jsonl; other datasets: {names}; name one file", path=data)
            train = files[0]
    elif not data.is_file():
        raise DataError("no such file or folder; name a JSONL, or the folder of coordexp data convert", path=data)
    part = train.name.removesuffix("train.jsonl")
    neighbour = train.with_name(f"{'' if part == train.name else part}val.jsonl")
    val = val or (neighbour if neighbour.is_file() and neighbour != train else None)
    checkpoint = Checkpoint.open(model)
    vocab = checkpoint.read_vocab()
    records = read_jsonl(train)
    check_dataset(records)
    if val is not None:
        read_jsonl(val, limit=1)
    # Tokens of the longest answer, and of the end of its turn.
    texts = sorted((serialize_objects(record.objects) for record in records), key=len, reverse=True)
    answer = max((len(vocab.encode_answer(text)) for text in texts[:_COUNTED]), default=0) + 1
    # Tokens of the largest image, as the checkpoint's image processor resizes it.
    rule = processor_rule(checkpoint.base)
    images = [math.prod(rule.size(record.width, record.height)) // rule.factor**2 for record in records]
    prompt = len(vocab.encode(DEFAULT_PROMPT)) + _CHAT_TOKENS
    sample = prompt + max(images, default=0) + answer
    some = records[:: max(1, len(records) // _TYPICAL)]
    lengths = [len(vocab.encode_answer(serialize_objects(record.objects))) + 1 for record in some]
    mean_answer = sum(lengths) / max(1, len(lengths))
    mean_sample = prompt + sum(images) / max(1, len(images)) + mean_answer
    positions = checkpoint.num_positions or _ROW
    if sample > positions:
        raise ConfigError(
            f"{train}: its longest sample takes about {sample} tokens and {model} supports {positions}; convert the "
            "data with a smaller --max-pixels, or take another model"
        )
    labels = [obj.desc for record in records for obj in record.objects]
    notes = _misfits(records, set(labels), read_card(model), model)
    few = records[:: max(1, len(records) // _TIMED)][:_TIMED]
    photos = tuple((record.image, rule.size(record.width, record.height)) for record in few)
    return DataAtHand(
        train, val, len(records), len(labels), len(set(labels)), sample, answer, mean_sample, mean_answer, positions,
        photos, notes,
    )  # fmt: skip


@cache
def _loading_seconds(photos: Sequence[tuple[Path, tuple[int, int]]]) -> float:
    """Seconds in which one process reads a photo and resizes it: the median, because the first one loads a decoder."""
    taken = []
    for path, size in photos:
        began = time.perf_counter()
        open_rgb(path).resize(size, Resampling.BICUBIC)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _loaders(at_hand: DataAtHand, parameters: int, adapters: bool, samples: int) -> tuple[int, str]:
    """Loader processes with which an H100 would hardly wait for photos, and why so many. ``samples``: of a row."""
    computing_s = (4 if adapters else 6) * parameters * at_hand.mean_sample / _FLOP_PER_S
    training_s = max(computing_s, _ROW_S / samples)
    loading_s = _loading_seconds(at_hand.photos)
    needed, cores = math.ceil(loading_s / training_s) + 1, max(1, len(os.sched_getaffinity(0)) - 1)
    why = (
        f"a photo takes {1e3 * loading_s:.1f} ms to read, and training on it about {1e3 * training_s:.1f} ms on an H100"
    )
    return min(needed, cores), why + (
        f"; {needed} would be needed, but this machine has too few cores" * (needed > cores)
    )


def _misfits(records: Sequence[ImageRecord], labels: set[str], card: Card, model: Path) -> tuple[str, ...]:
    notes = []
    seen = replace(card.preparation, resize=None)  # training does not resize
    unlike = [record for record in records if seen.is_unlike_training(record.width, record.height)]
    if unlike and seen.seen_pixels is not None:
        most, first = seen.seen_pixels[1], unlike[0]
        notes.append(
            f"{len(unlike)} of {len(records)} images are far from the size that {model} was trained at "
            f"({most:,} pixels), the first is {first.sample_id} ({first.width}x{first.height}); it learns faster from "
            f"images of that size: convert the data with --max-pixels {most}"
        )
    new = sorted(labels.difference(card.classes)) if card.classes else []
    if new:
        named = ", ".join(new[:5]) + (", …" if len(new) > 5 else "")
        notes.append(
            f"{len(new)} of {len(labels)} classes are new to {model}: {named}; stage 1 has to learn them first"
        )
    return tuple(notes)


def gpu_memory(assume_one: bool) -> int | None:
    """Bytes of the smallest GPU by nvidia-smi; None without one, or 80 GB if ``assume_one``: init may run elsewhere."""
    if shutil.which("nvidia-smi") is None:
        return 80_000_000_000 if assume_one else None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        raise ConfigError(f"nvidia-smi fails: {reason.strip()}; add --cpu, or repair it") from error
    return min(int(line) for line in listed.split()) * 2**20


def first_configuration(at_hand: DataAtHand, model: Path, stage: Stage, output: Path, gpu_bytes: int | None) -> str:
    """A commented, valid YAML for one device. ``gpu_bytes``: memory of the GPU; None for a CPU.

    Adapters are trained, instead of all weights, if the checkpoint is a LoRA run's or full training would not fit; then
    rows are halved until they fit. Stage 2 gets a colocated engine if vLLM is installed and fits.
    """
    run = read_card(model).training
    adapters = run is not None and run.train_type == "lora"
    text = _configuration(at_hand, model, stage, output, gpu_bytes is None, run, adapters)
    if gpu_bytes is None:
        return text
    checkpoint = Checkpoint.open(model)
    shapes = weight_shapes(checkpoint)

    def estimate(text: str) -> MemoryEstimate:
        return estimate_memory(parse_config(parse_yaml(text)), checkpoint.config, shapes)

    if not adapters and estimate(text).total > _USABLE * gpu_bytes:
        adapters = True
        text = _configuration(at_hand, model, stage, output, False, run, adapters)
    shortest = _rounded_up(at_hand.longest_sample, 64)
    while estimate(text).total > _USABLE * gpu_bytes and (row := parse_yaml(text)["global_max_length"]) > shortest:
        text = _configuration(at_hand, model, stage, output, False, run, adapters, row // 2)
    if stage == 2 and importlib.util.find_spec("vllm") is not None:
        text = _with_engine(text, estimate, gpu_bytes, sum(map(math.prod, shapes.values())))
    return recomputing_less(text, estimate, gpu_bytes)


def recomputing_less(text: str, estimate: Callable[[str], MemoryEstimate], gpu_bytes: int) -> str:
    """``text`` with activations recomputed in as few layers as memory allows, because that takes time."""
    for every in (None, 4, 3, 2):
        key = "training.gradient_checkpointing"
        changed = set_value(text, key, every is not None, "recompute activations: less memory, more time")
        if every is not None:
            changed = re.sub(
                r"(\n  gradient_checkpointing: .*)", rf"\1\n  gradient_checkpointing_every: {every}", changed
            )
        peak = estimate(changed).peak(gpu_bytes)
        if peak <= _ROOMY * gpu_bytes:
            fits = f"{peak / 1e9:.0f} of {gpu_bytes / 1e9:.0f} GB by estimate"
            if every is None:
                return set_value(changed, key, False, f"activations are kept: {fits}")
            return set_value(changed, f"{key}_every", every, f"in every {every}th layer only: {fits}; 1 = in all")
    return text


def _with_engine(text: str, estimate: Callable[[str], MemoryEstimate], gpu_bytes: int, parameters: int) -> str:
    """``text`` with a colocated engine on the largest share of the GPU that fits next to the trainer; ``text`` as it is
    if none fits."""
    colocated = set_value(text, "rollout_matching.decode_batch_size", 32)  # as in colocate.yaml, like the rest
    if parse_yaml(text)["model"]["dtype"] == "float32":
        colocated = set_value(colocated, "model.dtype", "bfloat16")
        masters = "master_weights: float32 # the optimizer's own copy of each weight: no update is too small for it"
        colocated = re.sub(r"(\n  bf16: .*)", rf"\1\n  {masters}", colocated, count=1)
    for offload in (False, True):
        engine = f"""\
  rollout_backend: vllm # an engine in the trainer's process; hf = transformers, which is slower
  vllm:
    mode: colocate
    tensor_parallel_size: 1 # trainer processes that share one engine
    gpu_memory_utilization: 0.1 # see below
    max_num_batched_tokens: 16384 # tokens of one engine step
    sleep_level: 1 # between rollouts the engine gives its memory back; 0 keeps it
  offload: # parts of the trainer that move to main memory during rollouts
    enabled: {str(offload).lower()} # {"the engine fits no other way" if offload else "both fit"}
    offload_optimizer: true
"""
        with_engine = re.sub(r"  rollout_backend: hf .*\n", lambda _, e=engine: e, colocated)
        need = estimate(with_engine)
        share = min(_ENGINE_MOST, math.floor(20 * (_USABLE - need.while_answering / gpu_bytes)) / 20)
        if share * gpu_bytes < 2 * parameters + _ENGINE_LEAST or need.total + ASLEEP > _USABLE * gpu_bytes:
            continue
        gigabytes = [f"{size / 1e9:.0f} GB" for size in (share * gpu_bytes, gpu_bytes, need.while_answering)]
        note = "# {} of {}; by estimate the trainer keeps {} during rollouts".format(*gigabytes)
        return with_engine.replace("gpu_memory_utilization: 0.1 # see below", f"gpu_memory_utilization: {share} {note}")
    return text


def _fit(at_hand: DataAtHand, stage: Stage, batch: int, most: int, longest_row: int) -> tuple[int, int]:
    """Samples of a micro-step, and tokens of the row that they fill: a row with less leaves samples waiting, more and
    more of them. ``most``: samples, where one long sample does not need a row for more."""
    # The model's answers may be longer than the annotations.
    typical = at_hand.mean_sample + (at_hand.mean_answer / 2 if stage == 2 else 0)
    shortest = min(at_hand.positions, _rounded_up(at_hand.longest_sample, 64))
    longest_row = min(at_hand.positions, max(shortest, longest_row))
    most = max(most, math.floor(2 * _FILLED * shortest / typical))  # one of these numbers divides the batch
    for samples in range(min(most, batch), 0, -1):
        row = max(shortest, _rounded_up(math.ceil(samples * typical / _FILLED), 64))
        if batch % samples == 0 and row <= longest_row:
            return samples, row
    return 1, shortest


def _longest_new(at_hand: DataAtHand, row: int) -> int:
    return max(1, min(row // 2, _rounded_up(2 * at_hand.longest_answer, 64)))


def _configuration(
    at_hand: DataAtHand,
    model: Path,
    stage: Stage,
    output: Path,
    cpu: bool,
    run: Training | None,
    adapters: bool,
    longest_row: int | None = None,
) -> str:
    text = asset(_TEMPLATES[stage]).read_text(encoding="utf-8")
    text = text[text.index("model:\n") :]
    if stage == 2:
        recipe = asset(_RECIPE).read_text(encoding="utf-8").partition("\nrollout_matching:\n")[2]
        text = re.sub(r"(?m)^  maskiou_gate:.*\n", "", text[: text.index("  pipeline:")]) + recipe
    most = min(2 if cpu else 8, at_hand.images)
    batch = most * max(1, min(8 if cpu else 32, at_hand.images) // most)
    device, row = _fit(at_hand, stage, batch, most, longest_row or (2048 if cpu else _ROW))
    steps = max(1, at_hand.images // batch)  # of an epoch
    epochs = parse_yaml(text)["training"]["num_train_epochs"]
    if stage == 1 and epochs * at_hand.images < _SEEN:
        epochs = min(_MOST_EPOCHS, round(_SEEN / at_hand.images))
    # Once an epoch, but at most four times in a run: an evaluation answers every image of the validation data.
    often = min(500 if stage == 1 else 200, max(steps, steps * epochs // 4))
    parameters = sum(map(math.prod, weight_shapes(Checkpoint.open(model)).values()))
    loaders, why = (
        (0, "the trainer's own process reads photos") if cpu else _loaders(at_hand, parameters, adapters, device)
    )
    values: dict[str, Any] = {
        "model.model": str(model),
        "custom.train_jsonl": str(at_hand.train),
        "custom.val_jsonl": None if at_hand.val is None else str(at_hand.val),
        "data.num_workers": loaders,
        "training.output_dir": str(output),
        **({"training.num_train_epochs": epochs} if stage == 1 else {}),
        "training.effective_batch_size": batch,
        "training.per_device_train_batch_size": device,
        "training.bf16": not cpu,
        **({"model.dtype": "float32", "training.master_weights": None} if cpu and stage == 1 else {}),
        "training.gradient_checkpointing": not cpu or parameters > _LARGE,
        "training.logging_steps": 1 if stage == 2 or steps < 10 else 10,
        "training.save_steps": often,
        "training.eval_steps": often,
        "training.eval_strategy": "no" if at_hand.val is None else "steps",
        **({"training.metric_for_best_model": None} if at_hand.val is None and stage == 2 else {}),
        "global_max_length": row,
        "rollout_matching.decode_batch_size": 4 if cpu else 8,
        "rollout_matching.max_new_tokens": _longest_new(at_hand, row),
    }
    notes: dict[str, str] = {"data.num_workers": f"loader processes: {why}"}
    if parameters < _LARGE:
        rate, source = _SMALL[stage]
        values |= {"training.learning_rate": rate, **({"training.vit_lr": None} if stage == 1 else {})}
        notes["training.learning_rate"] = f"{source}'s, measured with 4 M parameters; 2B to 8B take far less"
        text = re.sub(
            r"( target_sigma:) [\d.]+ +#.*", rf"\1 {_SMALL_SIGMA} # bins; {source}'s, for 4 M parameters", text
        )
        text = re.sub(r"( target_truncate:) [\d.]+", r"\1 null", text)
    if stage == 2 and at_hand.objects >= _CROWD * at_hand.images:
        crowd = {"rollout_matching.maskiou_gate": 0.4, "rollout_matching.target.duplicates": "drop",
                 "rollout_matching.target.missed": "in_order"}  # fmt: skip
        values |= crowd
        notes |= dict.fromkeys(
            crowd, f"for crowds: these images have {at_hand.objects / at_hand.images:.1f} objects each"
        )
    if adapters:
        tuner = re.search(r"(?ms)^tuner:\n.*?\n\n", asset(_ADAPTERS).read_text(encoding="utf-8"))
        assert tuner is not None
        text = re.sub(r"(?ms)^tuner:\n.*?\n\n", "", text).replace("\ntraining:\n", f"\n{tuner[0]}training:\n")
        rate = values.get("training.learning_rate") or parse_yaml(text)["training"]["learning_rate"]
        values |= {"training.learning_rate": rate * _ADAPTER_RATE, "model.dtype": "float32" if cpu else "bfloat16"}
        values |= {"training.vit_lr": None, "training.master_weights": None} if stage == 1 else {}
    if run is not None:
        values |= {path: getattr(run, path.rpartition(".")[2]) for path in _KEPT}
    for path, value in values.items():
        text = set_value(text, path, value, notes.get(path))
    if cpu:
        use_cpu = "use_cpu: true # there is no GPU; remove this line where there is one"
        text = re.sub(r"(\n  bf16: .*)", rf"\1\n  {use_cpu}", text, count=1)
    heading = (
        f"# yaml-language-server: $schema={asset(_SCHEMA)}\n"
        f"# Stage {stage}, written by coordexp init for {at_hand.images} images with {at_hand.classes} classes; the "
        f"longest sample takes about\n# {at_hand.longest_sample} tokens. All keys: "
        "docs/config-reference.md, and coordexp config check.\n"
    )
    return heading + text.rstrip("\n") + "\n"


def set_value(text: str, path: str, value: object, comment: str | None = None) -> str:
    """``text``, a YAML in block style, with the value of a dotted key replaced, and its comment unless that is None.
    Raises KeyError."""
    lines = text.split("\n")
    at = -1
    for depth, key in enumerate(path.split(".")):
        indent = "  " * depth
        for number in range(at + 1, len(lines)):
            line = lines[number]
            if depth and line.strip() and not line.startswith(indent):
                raise KeyError(path)  # the section ended
            if re.match(rf"{indent}{re.escape(key)}:(\s|$)", line):
                at = number
                break
        else:
            raise KeyError(path)
    head, old = re.fullmatch(r"(\s*[^:]+:)[^#]*?(\s+#.*)?", lines[at]).groups()  # pyright: ignore[reportOptionalMemberAccess]
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000).split("\n")[0]
    lines[at] = f"{head} {written}{old or '' if comment is None else f' # {comment}'}"
    return "\n".join(lines)


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def known_figures(model: Path) -> tuple[float, float, Path] | None:
    """F1 and recall of the checkpoint in ``model`` on validation data, and the file that has them: of its last
    ``coordexp evaluate``, or else of its training's last evaluation. None if it was never evaluated."""
    metrics = model / "evaluation" / METRICS
    if metrics.is_file():
        found = read_object(metrics.parent, METRICS, "evaluation").get("metrics") or {}
        if {"f1", "recall"} <= found.keys():
            return float(found["f1"]), float(found["recall"]), metrics
    history = read_object(model, STATE, "trainer state").get("log_history") or []
    for line in reversed(history):
        if "eval_rollout/f1" in line and "eval_rollout/recall" in line:
            return float(line["eval_rollout/f1"]), float(line["eval_rollout/recall"]), model / STATE
    return None


def advice_on_stage_2(model: Path) -> str:
    """What the README's table says of a stage 2 that starts from ``model``, by the figures next to it."""
    known = known_figures(model)
    if known is None:
        return (
            f"{model} has no evaluation next to it. If it misses most objects or repeats itself, train stage 1 longer: "
            f"stage 2 would make it worse. To see: coordexp evaluate --model {model} --data VAL.jsonl"
        )
    f1, recall, file = known
    figures = f"{model} has F1 {f1:.3f} and recall {recall:.3f} ({file})"
    if recall < _MISSES_MOST:
        return (
            f"{figures}: it misses most annotated objects. Train stage 1 longer; stage 2 would make it worse, unless "
            "the validation data lacks most annotations"
        )
    return (
        f"{figures}: it finds most annotated objects. Stage 2 helps if half or more of the annotations are missing; "
        "with complete ones stage 1 is enough"
    )
