"""``coordexp init``: a first configuration for this data, model and machine. Torch-free."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Literal

from coordexp.checkpoints.card import Card, Training, read_card
from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.fingerprints import fingerprint, is_same
from coordexp.checkpoints.folder import Checkpoint, processor_rule, read_object
from coordexp.checkpoints.memory import ASLEEP, ROOMY, MemoryEstimate, estimate_memory
from coordexp.checkpoints.run_folder import STATE, last_step_of
from coordexp.config import parse_config
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.config.source import dump_value
from coordexp.coords import serialize_objects
from coordexp.data.class_list import unseen_note
from coordexp.data.dataset_check import objects_problem
from coordexp.data.files import asset
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import METRICS
from coordexp.hub import name_of
from coordexp.inference.session import size_note
from coordexp.reading import parse_yaml
from coordexp.records import ImageRecord

Stage = Literal[1, 2]
_SCHEMA = "configs/coordexp.schema.json"
_CHAT_TOKENS = 32  # of the chat template around prompt and answer, generously
_COUNTED = 1000  # samples whose tokens are counted: those with the longest texts
_ROW = 12_000  # tokens of a packed row, where neither data nor model say otherwise
_LARGE = 100_000_000  # parameters from which memory matters more than a third of the time, also on a CPU
# Learning rates of 2B to 8B parameters, and of those below _LARGE: docs/guides/learning-rate.md.
_RATES: Mapping[Stage, tuple[float, float]] = {1: (2e-5, 5e-4), 2: (5e-6, 2e-4)}
_VIT_RATE = 2e-6  # of the vision tower of 2B to 8B parameters
_ADAPTER_RATE = 5  # learning rate of adapters, by that of all weights
_EPOCHS: Mapping[Stage, int] = {1: 3, 2: 1}
_SEEN = 2000  # photos times epochs from which small data is learned (docs/quickstart.md)
_MOST_EPOCHS = 200
_TRAINED_PER_ANSWER = 4  # least number of images trained on for each one that evaluations answer
_MISSES_MOST = 0.5  # recall below which stage 2 is not recommended
_FILLED = 0.95  # of a row, on average, by the samples of a micro-step
_TYPICAL = 200  # samples whose answers are counted for their mean
_LOADERS = 4  # loader processes next to a GPU, at most
_CROWD = 6.0  # objects per image, on average, from which the study's recipe for crowds is better
_USABLE = 0.85  # of a GPU's memory: the rest is CUDA's and fragmentation
_ENGINE_LEAST = 6_000_000_000  # bytes that an engine needs next to its weights: activations, cache, CUDA graphs
_ENGINE_MOST = 0.6  # of a GPU's memory: enough cache for decode_batch_size answers
_LEFT_OUT = "\0"  # ends a line that is not written; YAML has no such character


@dataclass(frozen=True, slots=True)
class DataAtHand:
    """The dataset of a run; ``evaluated``: images of ``val``. Samples and answers: approximate numbers of tokens.
    ``notes``: data that does not fit the model."""

    train: Path
    val: Path | None
    images: int
    evaluated: int
    objects: int
    classes: int
    longest_sample: int
    longest_answer: int
    mean_sample: float
    mean_answer: float
    positions: int
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
    evaluated = [] if val is None else read_jsonl(val)
    for path, found in ((train, records), *([] if val is None else [(val, evaluated)])):
        if (problem := objects_problem(found)) is not None:  # training would refuse it
            raise DataError(f"{problem}; convert the annotations again", path=path)
    card = read_card(model)
    # Tokens of the longest answer, of training or evaluation, and of the end of its turn.
    texts = sorted((serialize_objects(one.objects) for one in (*records, *evaluated)), key=len, reverse=True)
    answer = max((len(vocab.encode_answer(text)) for text in texts[:_COUNTED]), default=0) + 1
    # Tokens of the largest image, as the checkpoint's image processor resizes it.
    rule = processor_rule(checkpoint.base)
    images = [math.prod(rule.size(record.width, record.height)) // rule.factor**2 for record in records]
    asked = (DEFAULT_PROMPT,) if card.training is None else (card.training.prompt, card.training.system or "")
    prompt = sum(len(vocab.encode(text)) for text in asked) + _CHAT_TOKENS
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
    notes = _misfits(records, set(labels), card, model)
    if (unseen := unseen_note(records, evaluated)) is not None:
        notes += (f"{val}: {unseen}",)
    return DataAtHand(
        train, val, len(records), len(evaluated), len(labels), len(set(labels)), sample, answer,
        mean_sample, mean_answer, positions, notes,
    )  # fmt: skip


def _misfits(records: Sequence[ImageRecord], labels: set[str], card: Card, model: Path) -> tuple[str, ...]:
    advice = "it learns faster from images of that size: convert the data with --max-pixels {most}"
    size = size_note(records, replace(card.preparation, resize=None), advice)  # training does not resize
    notes = [] if size is None else [size]
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
    sizes = [line.strip() for line in listed.splitlines()]
    if not sizes or not all(size.isdecimal() for size in sizes):  # "No devices were found", or [N/A] in shared memory
        raise ConfigError(f"nvidia-smi fails: {listed.strip() or 'it lists no GPU'}; add --cpu, or repair it")
    return min(map(int, sizes)) * 2**20


@dataclass(frozen=True, slots=True)
class Engine:
    """A colocated engine. ``share``: of the GPU's memory; ``offload``: move the optimizer's state to main memory during
    rollouts; ``note``: memory of both."""

    share: float
    offload: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choices of ``init``; the templates contain the rest.

    ``run``: the run that trained the checkpoint, whose prompt and orders are kept; ``small``: the model is; ``batch``:
    samples of an optimizer step, ``samples``: of a micro-step; ``row``: tokens; ``interval``: steps between
    checkpoints, ``evaluated_every``: between evaluations, a multiple of it; ``recompute_every``: activations are
    recomputed in one layer of this many, 0: in none.
    """

    stage: Stage
    cpu: bool
    run: Training | None
    small: bool
    lora: bool
    batch: int
    samples: int
    row: int
    epochs: int
    interval: int
    evaluated_every: int
    logging_steps: int
    recompute_every: int
    memory: str = "a small model needs little memory"
    engine: Engine | None = None


Estimate = Callable[[Decision], MemoryEstimate]


def first_configuration(at_hand: DataAtHand, model: Path, stage: Stage, output: Path, gpu_bytes: int | None) -> str:
    """A commented, valid YAML for one device. ``gpu_bytes``: memory of the GPU; None for a CPU.

    Adapters are trained, instead of all weights, if the checkpoint is a LoRA run's or full training would not fit; then
    rows are halved until they fit. Stage 2 gets a colocated engine if vLLM is installed and fits.
    """
    checkpoint = Checkpoint.open(model)
    shapes = weight_shapes(checkpoint)

    def estimate(decision: Decision) -> MemoryEstimate:
        config = parse_config(parse_yaml(render(decision, at_hand, model, output)))
        return estimate_memory(config, checkpoint.config, shapes)

    parameters = sum(map(math.prod, shapes.values()))
    decision = decide(at_hand, stage, gpu_bytes, parameters, read_card(model).training, estimate)
    return render(decision, at_hand, model, output)


def decide(
    at_hand: DataAtHand, stage: Stage, gpu_bytes: int | None, parameters: int, run: Training | None, estimate: Estimate
) -> Decision:
    """Choose what depends on the data, the model and the device. ``gpu_bytes``: memory of the GPU; None for a CPU.
    ``parameters``: the model's; ``run``: the run that trained it; ``estimate``: memory of a decision."""
    cpu, images = gpu_bytes is None, at_hand.images
    most = min(2 if cpu else 8, images)
    batch = most * max(1, min(8 if cpu else 32, images) // most)
    samples, row = _fit(at_hand, stage, batch, most, 2048 if cpu else _ROW)
    epochs = _EPOCHS[stage]
    if stage == 1 and epochs * images < _SEEN:
        epochs = min(_MOST_EPOCHS, round(_SEEN / images))
    steps = math.ceil(images / batch)  # of an epoch; the last one may have fewer samples
    # A checkpoint each epoch, but at most four in a run; long runs have more, so that an interruption loses little.
    interval = min(500 if stage == 1 else 200, max(steps, math.ceil(steps * epochs / 4)))
    decision = Decision(
        stage=stage,
        cpu=cpu,
        run=run,
        small=parameters < _LARGE,
        lora=run is not None and run.train_type == "lora",
        batch=batch,
        samples=samples,
        row=row,
        epochs=epochs,
        interval=interval,
        # An evaluation answers every image of the validation data: one at most for _TRAINED_PER_ANSWER trained on.
        evaluated_every=interval * math.ceil(_TRAINED_PER_ANSWER * at_hand.evaluated / (batch * interval) or 1),
        logging_steps=1 if stage == 2 or steps < 10 else 10,
        recompute_every=0 if cpu and parameters <= _LARGE else 1,
    )
    if gpu_bytes is None:
        return decision
    # If all weights do not fit, adapters; if these do not, shorter rows.
    if estimate(decision).total > _USABLE * gpu_bytes:
        decision = replace(decision, lora=True)
    while decision.row > _shortest_row(at_hand, stage) and estimate(decision).total > _USABLE * gpu_bytes:
        samples, row = _fit(at_hand, stage, batch, most, decision.row // 2)
        decision = replace(decision, samples=samples, row=row)
    if stage == 2 and importlib.util.find_spec("vllm") is not None:
        decision = replace(decision, engine=_largest_engine(decision, estimate, gpu_bytes, parameters))
    # Recomputing takes time: in as few layers as memory allows.
    for every in (0, 4, 3, 2):
        candidate = replace(decision, recompute_every=every)
        peak = estimate(candidate).peak(gpu_bytes)
        if peak <= ROOMY * gpu_bytes:
            decision = replace(candidate, memory=f"{peak / 1e9:.0f} of {gpu_bytes / 1e9:.0f} GB by estimate")
            break
    return decision


def _fit(at_hand: DataAtHand, stage: Stage, batch: int, most: int, longest_row: int) -> tuple[int, int]:
    """Samples of a micro-step, and tokens of the row that they fill: a row with less leaves samples waiting, more and
    more of them. ``most``: samples, where one long sample does not need a row for more."""
    # The model's answers may be longer than the annotations.
    typical = at_hand.mean_sample + (at_hand.mean_answer / 2 if stage == 2 else 0)
    shortest = _shortest_row(at_hand, stage)
    longest_row = min(at_hand.positions, max(shortest, longest_row))
    most = max(most, math.floor(2 * _FILLED * shortest / typical))  # one of these numbers divides the batch
    for samples in range(min(most, batch), 0, -1):
        row = max(shortest, _rounded_up(math.ceil(samples * typical / _FILLED), 64))
        if batch % samples == 0 and row <= longest_row:
            return samples, row
    return 1, shortest


def _shortest_row(at_hand: DataAtHand, stage: Stage) -> int:
    """Tokens of a row for one sample. In stage 2 it has the model's answer, and may have all annotations after it."""
    longest = at_hand.longest_sample + (at_hand.longest_answer if stage == 2 else 0)
    return min(at_hand.positions, _rounded_up(longest, 64))


def _longest_answer(at_hand: DataAtHand, stage: Stage, row: int) -> int:
    """Tokens that an answer may have: twice the longest annotated one, if they fit into a row of ``row`` tokens with
    the prompt and, in stage 2, with all annotations after them."""
    room = row - at_hand.longest_sample + (at_hand.longest_answer if stage == 1 else 0)
    return max(at_hand.longest_answer, min(_rounded_up(2 * at_hand.longest_answer, 64), room))


def _largest_engine(decision: Decision, estimate: Estimate, gpu_bytes: int, parameters: int) -> Engine | None:
    """The engine with the largest share of the GPU that fits next to the trainer; None if none fits."""
    for offload in (False, True):
        need = estimate(replace(decision, engine=Engine(0.1, offload)))
        share = min(_ENGINE_MOST, math.floor(20 * (_USABLE - need.while_answering / gpu_bytes)) / 20)
        if share * gpu_bytes >= 2 * parameters + _ENGINE_LEAST and need.total + ASLEEP <= _USABLE * gpu_bytes:
            own, gpu, kept = (f"{size / 1e9:.0f} GB" for size in (share * gpu_bytes, gpu_bytes, need.while_answering))
            return Engine(share, offload, f"{own} of {gpu}; by estimate the trainer keeps {kept} during rollouts")
    return None


def render(decision: Decision, at_hand: DataAtHand, model: Path, output: Path) -> str:
    """The YAML of a decision: the template of its stage with each ``$name`` filled in. Lines that end with ``$if_name``
    are written if that holds, those with ``$unless_name`` if not."""
    stage, lora, run, engine = decision.stage, decision.lora, decision.run, decision.engine
    in_bfloat16 = not decision.cpu and (stage == 1 or lora or engine is not None)
    masters = in_bfloat16 and not lora  # adapters are float32
    rate = _RATES[stage][decision.small] * (_ADAPTER_RATE if lora else 1)
    density = at_hand.objects / at_hand.images
    values: dict[str, object] = {
        "model": name_of(model) or str(model),
        "dtype": "bfloat16" if in_bfloat16 else "float32",
        "system": run and run.system,
        "prompt": run and run.prompt,
        "object_field_order": run.object_field_order if run else "desc_first",
        "object_ordering": run.object_ordering if run else "sorted",
        "loaders": 0 if decision.cpu else min(_LOADERS, max(1, len(os.sched_getaffinity(0)) - 1)),
        "train": str(at_hand.train),
        "val": None if at_hand.val is None else str(at_hand.val),
        "output": str(output),
        "epochs": decision.epochs,
        "batch": decision.batch,
        "samples": decision.samples,
        "rate": rate,
        "coord_rate": rate / 2,  # as in configs/stage1/lora.yaml
        "vit_rate": None if lora or decision.small else _VIT_RATE,
        "masters": "float32" if masters else None,
        "bf16": not decision.cpu,
        "every": decision.recompute_every,
        "logging_steps": decision.logging_steps,
        "interval": decision.interval,
        "evaluated_every": decision.evaluated_every,
        "row": decision.row,
        "engine_share": engine and engine.share,
        "offload": engine and engine.offload,
        "answers": 4 if decision.cpu else 8 if engine is None else 32,  # with an engine as in colocate.yaml
        "longest_answer": _longest_answer(at_hand, stage, decision.row),
    }
    comments = {
        "schema": asset(_SCHEMA),
        "images": at_hand.images,
        "classes": at_hand.classes,
        "longest_sample": at_hand.longest_sample,
        "density": f"{density:.1f}",
        "memory": decision.memory,
        "engine_note": engine and engine.note,
    }
    conditions = {
        "small": decision.small,
        "lora": lora,
        "masters": masters,
        "cpu": decision.cpu,
        "recomputed": decision.recompute_every > 0,
        "thinned": decision.recompute_every > 1,
        "evaluated": at_hand.val is not None,
        "engine": engine is not None,
        "crowded": density >= _CROWD,
    }
    template = Template(Path(__file__).with_name(f"init_stage{stage}.yaml").read_text(encoding="utf-8"))
    text = template.substitute(
        comments,
        **{name: dump_value(value) for name, value in values.items()},
        **{f"if_{name}": "" if holds else _LEFT_OUT for name, holds in conditions.items()},
        **{f"unless_{name}": _LEFT_OUT if holds else "" for name, holds in conditions.items()},
    )
    return "\n".join(line.rstrip() for line in text.split("\n") if not line.endswith(_LEFT_OUT))


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def known_figures(model: Path) -> tuple[float, float, Path] | None:
    """F1 and recall of the checkpoint in ``model`` on validation data, and the file that has them: of its last
    ``coordexp evaluate``, unless it was trained since, or else of its training's last evaluation of these weights. None
    if it was never evaluated."""
    metrics = model / "evaluation" / METRICS
    if metrics.is_file():
        content = read_object(metrics.parent, METRICS, "evaluation")
        found, prints = content.get("metrics") or {}, content.get("fingerprints")
        is_of_this = not (isinstance(prints, list) and prints) or is_same(prints[0], fingerprint(model))
        if is_of_this and {"f1", "recall"} <= found.keys():
            return float(found["f1"]), float(found["recall"]), metrics
    state = read_object(model, STATE, "trainer state")
    last = last_step_of(model, state)
    for line in reversed(state.get("log_history") or []):
        if {"eval_rollout/f1", "eval_rollout/recall"} <= line.keys() and line.get("step", 0) <= last:
            return float(line["eval_rollout/f1"]), float(line["eval_rollout/recall"]), model / STATE
    return None


def advice_on_stage_2(model: Path) -> str:
    """The README's advice on a stage 2 that starts from ``model``, by the figures next to it."""
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
