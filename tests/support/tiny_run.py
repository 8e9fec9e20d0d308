"""A real but very small Qwen3-VL, small scenes, and runs that train one on the other within seconds."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from coordexp.checkpoints.folder import RESOLVED_CONFIG
from coordexp.checkpoints.run_folder import SEAL
from coordexp.config import RunConfig, load_config
from coordexp.coords import TURN_END, serialize_objects
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.data.scenes import SceneSpec, make_scene
from coordexp.matching import MatchingConfig
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, ProcessorAndVocab, load_model, load_processor_and_vocab
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.objective import RowObjective, sft_pipeline
from coordexp.packing import CarryBuffer
from coordexp.recording.writer import RolloutLog
from coordexp.records import GTObject, ImageRecord, PackedRow, Rollout, RolloutRequest, Segment
from coordexp.rollouts.backend import IndexedRollout, RolloutRound
from coordexp.targets import TargetPolicy, TransportConfig, build_gt_target
from coordexp.training.rows import RowPlanner
from coordexp.training.step import PreparedStep, Task, prepare_step
from coordexp.training.step_answers import AnswerReader, RolloutQueue, TargetOptions
from support.config_samples import set_keys, stage1, stage2, two_channel, write_yaml

SPEC = TinySpec(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96,
    vision_hidden=32, vision_depth=2, vision_heads=2, vision_mlp=64, min_pixels=32 * 32,
)  # fmt: skip
SIZES = (64, 48, 80, 64, 96, 48)
PROMPT = "Detect."


@lru_cache(maxsize=1)
def _session_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="coordexp-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # forked processes forget this
    return Path(folder)


@lru_cache(maxsize=1)
def tiny_checkpoint() -> Path:
    """Random weights, built once per session. Leave it as it is; train copies in folders of your own."""
    return build_tiny_checkpoint(_session_folder() / "model", seed=3, spec=SPEC)


@lru_cache(maxsize=1)
def tiny_scenes() -> Path:
    """A JSONL of twelve scenes of several image sizes, one of them without objects."""
    folder = _session_folder() / "scenes"
    (folder / "images").mkdir(parents=True)
    records = []
    for index in range(12):
        size = SIZES[index % len(SIZES)]
        spec = SceneSpec(size=size, min_side=10, max_side=20, max_objects=3, empty=1.0 if index == 5 else 0.0)
        image, objects = make_scene(spec, 11, index)
        path = folder / "images" / f"{index}.png"
        image.save(path)
        records.append(ImageRecord(str(index), path, size, size, objects))
    write_jsonl(records, folder / "scenes.jsonl")
    return folder / "scenes.jsonl"


@lru_cache(maxsize=1)
def tiny_processor_and_vocab() -> ProcessorAndVocab:
    """Of :func:`tiny_checkpoint`, read once per session. Leave them as they are."""
    return load_processor_and_vocab(tiny_checkpoint())


def load_tiny(
    dtype: str = "float32", attention: str = "packed", sharpen: float = 1.0, checkpoint: Path | None = None
) -> LoadedModel:
    """The tiny model, or that of ``checkpoint``; ``sharpen`` multiplies its matrices, so that greedy answers are
    unambiguous. Its weights are the caller's own; leave the processor as it is."""
    path = checkpoint or tiny_checkpoint()
    known = tiny_processor_and_vocab() if path == tiny_checkpoint() else None
    loaded = load_model(path, dtype, attention, known)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(sharpen)
    return loaded


def encoder_of(loaded: LoadedModel) -> PromptEncoder:
    return PromptEncoder(loaded.processor, PROMPT, None)


def tiny_samples(loaded: LoadedModel, count: int = 12) -> list[Sample]:
    dataset = RecordDataset(read_jsonl(tiny_scenes()), encoder_of(loaded).encode)
    return [dataset[index] for index in range(count)]


def gt_segments(loaded: LoadedModel, count: int = 6) -> list[Segment]:
    """Segments of different lengths and image sizes, answers written from ground truth."""
    return [
        Segment(
            sample.record.sample_id,
            sample.request.prompt_token_ids,
            build_gt_target(
                sample.record.objects, loaded.vocab, sample_id=sample.record.sample_id, field_order="desc_first"
            ),
            sample.request.model_inputs,
        )
        for sample in tiny_samples(loaded, count)
    ]


def inputs_alone(loaded: LoadedModel, segment: Segment) -> dict[str, Any]:
    """Arguments of a forward over one segment, with the model's own positions and mask."""
    ids = torch.tensor([[*segment.prompt_token_ids, *segment.target.token_ids]])
    is_image = (ids == loaded.image_token_id).int()
    return {"input_ids": ids, "mm_token_type_ids": is_image, "use_cache": False, **segment.model_inputs}


def run_config(folder: Path, stage: int | Literal["two_channel"], name: str = "run", /, **keys: Any) -> RunConfig:
    """Train the tiny model on the tiny scenes for two steps; ``keys``: dotted keys with ``__`` for the dot."""
    rollouts: Any = {"rollout_backend": "hf", "max_new_tokens": 12, "decode_batch_size": 3}
    if stage == 1:
        config = stage1() | {"rollout_matching": rollouts}
    else:
        config = stage2(**rollouts) if stage == 2 else two_channel(**rollouts)
    config["model"] = {"model": str(tiny_checkpoint()), "dtype": "float32"}
    config["template"] = {"prompt": PROMPT}
    config["custom"] |= {"train_jsonl": str(tiny_scenes()), "val_jsonl": str(tiny_scenes()), "val_sample_limit": 5}
    config["global_max_length"] = 512
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "packing_min_fill_ratio": 0.01,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return load_config(write_yaml(folder, set_keys(config, keys), f"{name}.yaml"))


def train(config: RunConfig, backend: Any = None, on_built: Callable[[Any], None] | None = None) -> Any:
    """Train as ``coordexp train`` does; ``backend`` answers in place of the configuration's. Returns the trainer, which
    has left its servers; after an error it is closed."""
    from coordexp.engine.trainer.server_backend import ServerBackend
    from coordexp.training.checked_run import check_run
    from coordexp.training.run import build_trainer

    trainer, resume = build_trainer(check_run(config), Console(quiet=True), backend=backend)
    if on_built is not None:
        on_built(trainer)
    try:
        trainer.train(None if resume is None else str(resume))
    except BaseException:
        trainer.close()
        raise
    if isinstance(trainer.backend, ServerBackend):
        trainer.backend.close()
    return trainer


def forget_configuration(output_dir: Path) -> None:
    """Leave checkpoints as an unknown program might have written them: without a configuration to compare with."""
    for path in output_dir.rglob(RESOLVED_CONFIG):
        path.unlink()
        seal = path.with_name(SEAL)
        if seal.is_file():
            content = json.loads(seal.read_text())
            del content["files"][RESOLVED_CONFIG]
            seal.write_text(json.dumps(content))


def step_lines(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def figures(trainer: Any) -> list[dict[str, float]]:
    """The same without seconds, for comparisons of two runs."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")} for line in step_lines(trainer)
    ]


def watch_steps(trainer: Any) -> list[PreparedStep]:
    """The prepared steps, in a list that grows as the trainer runs."""
    prepared: list[PreparedStep] = []
    accumulate = trainer.step.accumulate

    def watched(*arguments: Any) -> None:
        try:
            accumulate(*arguments)
        finally:
            prepared.append(trainer.step.prepared)

    trainer.step.accumulate = watched
    return prepared


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def kill_at(step: int) -> Callable[[Any], None]:
    """``on_built`` of a run that dies before it reads the samples of the step after ``step`` finished ones."""

    def arm(trainer: Any) -> None:
        accumulate = trainer.step.accumulate

        def accumulate_or_die(batches: Any, finished: int) -> None:
            if finished == step:
                raise Killed
            accumulate(batches, finished)

        trainer.step.accumulate = accumulate_or_die

    return arm


def task_of(
    loaded: LoadedModel,
    backend: Any = None,
    *,
    capacity: int | None = 400,
    most: int = 64,
    fill: float = 0.0,
    **targets: Any,
) -> Task:
    """A step on ground truth or, with ``backend``, on rollouts. ``capacity``, ``most``, ``fill``: of its rows;
    ``targets``: of its TargetOptions."""
    buffer = None if capacity is None else CarryBuffer(capacity, most)
    planner = RowPlanner(buffer, capacity=capacity, min_fill_ratio=fill)
    options = TargetOptions(**{"vocab": loaded.vocab, "field_order": "desc_first", "transport": TransportConfig(),
                               "policy": TargetPolicy()} | targets)  # fmt: skip
    queue = None
    if backend is not None:
        queue = RolloutQueue(backend, AnswerReader(loaded.vocab, MatchingConfig()), 3)
    return Task(RowObjective(sft_pipeline(None), loaded.vocab.coord_token_ids), planner, options, queue)


def prepare(
    task: Task, batches: Sequence[Sequence[Sample]], step: int = 0, log: RolloutLog | None = None
) -> tuple[PreparedStep, dict[str, float]]:
    metrics: defaultdict[str, float] = defaultdict(float)
    log = RolloutLog(_session_folder(), 0) if log is None else log
    return prepare_step(task, [list(batch) for batch in batches], step, metrics, log), metrics


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class QuietBackend:
    """A backend without weights, memory or metrics; subclasses answer in :meth:`generate`."""

    batch_size = 3

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
        raise NotImplementedError

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        for round_idx, one in enumerate(rounds):
            for index, rollout in enumerate(self.generate(one.requests, one.seeds)):
                yield IndexedRollout(round_idx, index, rollout)

    def sync_weights(self, version: int) -> None: ...

    def release(self) -> None: ...

    def last_report(self) -> Mapping[str, Any]:
        return {}

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


class InMemoryBackend(QuietBackend):
    """A rollout backend that answers from a table by sample and records its requests."""

    def __init__(self, vocab: Any, answers: Callable[[RolloutRequest], str]) -> None:
        self._vocab = vocab
        self._answers = answers
        self.calls: list[tuple[str, ...]] = []
        self.seeds: list[Any] = []
        self.versions: list[int] = []
        self.closed = 0

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
        self.calls.append(tuple(request.sample_id for request in requests))
        self.seeds.append(seeds)
        return [self._rollout(request) for request in requests]

    def last_report(self) -> Mapping[str, Any]:
        return {"backend": "in memory", "weight_version": self.versions[-1] if self.versions else 0}

    def _rollout(self, request: RolloutRequest) -> Rollout:
        text = self._answers(request)
        ended = text.endswith(TURN_END)
        ids = tuple(self._vocab.encode(text.removesuffix(TURN_END)))
        return Rollout(
            request.sample_id, request.prompt_token_ids, ids, self._vocab.decode(ids), truncated=not ended,
            weight_version=self.versions[-1] if self.versions else 0,
        )  # fmt: skip

    def sync_weights(self, version: int) -> None:
        self.versions.append(version)

    def close(self) -> None:
        self.closed += 1


def nearly_right(objects: Sequence[GTObject], shift: int = 15) -> str:
    """A finished answer that finds every object but the last, each a little off."""
    moved = [GTObject(obj.desc, obj.kind, tuple(min(999, value + shift) for value in obj.bins)) for obj in objects[:-1]]
    return serialize_objects(moved) + TURN_END


def row_of(segments: Sequence[Segment]) -> PackedRow:
    from coordexp.packing import build_row

    return build_row(segments)


def finder() -> InMemoryBackend:
    """Finds every object but the last, each a little off: boxes to correct and objects to append in every step."""
    truth = {one.sample_id: one.objects for one in read_jsonl(tiny_scenes())}
    return InMemoryBackend(tiny_processor_and_vocab().vocab, lambda request: nearly_right(truth[request.sample_id]))
