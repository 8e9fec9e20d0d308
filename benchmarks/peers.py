"""The cost of a training image here, in ms-swift and in TRL: SFT, and learning from the model's own answers.

The same checkpoint, generated scenes, prompt, precision, samples of a step, decoding limits and cores; one process
each, one after the other, in one run. A callback in each trainer records when a step ends; the first steps do not
count. Prompts are compared token by token before training. Besides seconds there are processor seconds: on a busy
machine only these are meaningful. ``--shape 2B`` compares at real width instead: see peers_width.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers_width
from reporting import machine, not_negative, parser, positive, print_machine, write_json
from rich.console import Console
from rich.table import Table

PROMPT = "Detect every object."
MAX_NEW_TOKENS = 192
LEARNING_RATE = 1e-5  # so low that answers stay as long as they were in all of them

# Contender → (group, description).
CONTENDERS: dict[str, tuple[str, str]] = {
    "coordexp-sft": ("SFT", "CoordExp, stage 1: packed rows, a head over supervised positions alone"),
    "trl-sft": ("SFT", "TRL SFTTrainer: padded batches (its packing takes no images)"),
    "swift-sft": ("SFT", "ms-swift `swift sft`: padded batches (its packing needs flash-attn)"),
    "coordexp-stage2": ("own answers", "CoordExp, stage 2: one greedy answer an image, rewritten target"),
    "trl-grpo-2": ("own answers", "TRL GRPOTrainer, 2 answers an image"),
    "trl-grpo-4": ("own answers", "TRL GRPOTrainer, 4 answers an image"),
    "trl-grpo-8": ("own answers", "TRL GRPOTrainer, 8 answers an image"),
    "swift-grpo-2": ("own answers", "ms-swift `swift rlhf --rlhf_type grpo`, 2 answers an image"),
    "swift-grpo-4": ("own answers", "ms-swift `swift rlhf --rlhf_type grpo`, 4 answers an image"),
    "swift-grpo-8": ("own answers", "ms-swift `swift rlhf --rlhf_type grpo`, 8 answers an image"),
}


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=positive, help="steps that count, of each [8; with --shape 1]")
    flags.add_argument("--warmup", type=not_negative, help="steps before them that do not [2; with --shape 0]")
    flags.add_argument("--images", type=positive, help="images of a step, for GRPO prompts [16; with --shape 4]")
    names = list(CONTENDERS)
    flags.add_argument("--only", nargs="+", choices=names, default=names, help="these alone [all]")
    peers_width.add_flags(flags)
    flags.add_argument("--deadline", type=positive, default=1800, help="seconds one contender may take [1800]")
    flags.add_argument("--contender", choices=names, help=argparse.SUPPRESS)  # the process of one of them
    flags.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = flags.parse_args(argv)
    for key, tiny, wide in (("steps", 8, 1), ("warmup", 2, 0), ("images", 16, 4)):
        if getattr(options, key) is None:
            setattr(options, key, wide if options.shape else tiny)
    if options.shape:
        if options.photos is None:
            flags.error("--shape needs --photos DATA.jsonl, a dataset of photographs")
        peers_width.compare(options)
        return
    if options.contender:
        run_contender(options)
        return
    console = Console()
    where = machine()
    threads = options.threads or 1
    print_machine(console, where, images=options.images, steps=options.steps, threads=threads)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="coordexp-peers-") as folder:
        write_data(Path(folder), options.images * (options.warmup + options.steps))
        for name in options.only:
            results[name] = measure(name, Path(folder), options, threads)
            console.print(f"{name}: {results[name].get('why', 'done')}", style="dim", highlight=False, markup=False)
    add_ratios(results)
    console.print(table(results))
    write_json(options.json, "peers", where, {**vars(options), "threads": threads}, results)


def measure(name: str, folder: Path, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Run one contender in a process of its own: seconds and processor seconds of an image, or why there are none."""
    command = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
    for key in ("steps", "warmup", "images"):
        command += [f"--{key}", str(getattr(options, key))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{name}.log"
    try:
        with log.open("w") as output:
            ended = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=options.deadline, cwd=folder
            )
    except subprocess.TimeoutExpired:
        return {"why": f"not done after {options.deadline} s"}
    if ended.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"why": f"ended with {ended.returncode}: {lines[-1][:300] if lines else 'no output'}"}
    marks = json.loads((folder / f"{name}.json").read_text())
    (wall, cpu), (wall_end, cpu_end) = marks[options.warmup], marks[options.warmup + options.steps]
    images = options.images * options.steps
    return {"seconds": (wall_end - wall) / images, "cpu_seconds": (cpu_end - cpu) / images, "images": images}


def add_ratios(results: dict[str, dict[str, Any]]) -> None:
    """Each contender's processor seconds of an image over CoordExp's that answers the same question."""
    ours = {CONTENDERS[name][0]: row for name, row in results.items() if name.startswith("coordexp")}
    for name, row in results.items():
        base = ours.get(CONTENDERS[name][0], {})
        if "cpu_seconds" in row and "cpu_seconds" in base:
            row["ratio"] = row["cpu_seconds"] / base["cpu_seconds"]


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row a contender, or the reason why it has no figures."""
    shown = Table("question", "contender", "s/image", "CPU s/image", "CoordExp's = 1")
    for name, row in results.items():
        question, what = CONTENDERS[name]
        if "why" in row:
            shown.add_row(question, what, "-", "-", row["why"])
            continue
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
        shown.add_row(question, what, f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}", ratio)
    return shown


# The data and settings that all of them share.


def write_data(folder: Path, count: int) -> None:
    """Scenes as our JSONL and, with the very same prompts and answers, as ms-swift's."""
    from coordexp.coords import serialize_objects
    from coordexp.data.jsonl import order_objects, read_jsonl
    from coordexp.data.scenes import MODERATE, write_scenes

    data = write_scenes(folder / "scenes", count, MODERATE, seed=11)
    with (folder / "swift.jsonl").open("w") as file:
        for index, record in enumerate(read_jsonl(data)):
            answer = serialize_objects(order_objects(record.objects, "sorted"))
            user = {"role": "user", "content": f"<image>{PROMPT}"}
            line = {
                "messages": [user, {"role": "assistant", "content": answer}],
                "images": [str(record.image)], "sample": index,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def start() -> Path:
    """The checkpoint that all of them train: the demo's, whose answers end."""
    from coordexp.data.files import asset

    return asset("checkpoints/demo-stage1")


def watch(first_batch: Callable[[Any], None] | None = None) -> list[tuple[float, float]]:
    """Have every trainer of transformers that is built from now on mark its start and steps as :func:`clock` says."""
    from transformers import trainer

    marks, stopwatch = clock(first_batch)
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(stopwatch)
    return marks


def clock(first_batch: Callable[[Any], None] | None = None) -> tuple[list[tuple[float, float]], type]:
    """A list, and a callback that adds (clock, processor seconds) to it when training begins and after each step.
    ``first_batch`` gets a batch before."""
    from transformers import TrainerCallback

    marks: list[tuple[float, float]] = []

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
            if first_batch is not None:
                first_batch(next(iter(train_dataloader)))
            self.mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.mark()

        def mark(self) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    return marks, Stopwatch


def trainer_settings(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """TrainingArguments of both peers, equal to CoordExp's YAML below."""
    return {
        "output_dir": str(output), "max_steps": options.warmup + options.steps, "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "gradient_checkpointing": False,
        "bf16": False, "fp16": False, "use_cpu": True, "seed": 0, "save_strategy": "no", "report_to": [],
        "logging_steps": 100, "dataloader_num_workers": 0,
    }  # fmt: skip


# The contenders.


def run_contender(options: argparse.Namespace) -> None:
    """Train one of them and write its marks; its process ends with it."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name, folder = options.contender, options.folder
    family, _, rest = name.partition("-")
    kind, _, group = rest.partition("-")
    runners: dict[tuple[str, str], Callable[..., list[tuple[float, float]]]] = {
        ("coordexp", "sft"): ours, ("coordexp", "stage2"): ours, ("trl", "sft"): trl_sft, ("trl", "grpo"): trl_grpo,
        ("swift", "sft"): swift, ("swift", "grpo"): swift,
    }  # fmt: skip
    marks = runners[family, kind](options, folder / name, int(group or 1))
    (folder / f"{name}.json").write_text(json.dumps(marks))


def ours(options: argparse.Namespace, output: Path, group: int) -> list[tuple[float, float]]:
    """Stage 1 or 2 by CoordExp, as its demo trains, without coordinate losses in stage 1, which peers do not have."""
    from coordexp.config import load_config
    from coordexp.data.files import asset
    from coordexp.training.checked_run import check_run
    from coordexp.training.run import build_trainer

    stage_2 = output.name.endswith("stage2")
    data = options.folder / "scenes" / "scenes.jsonl"
    values: dict[str, Any] = {
        "model.model": str(start()),
        "custom.train_jsonl": str(data),
        "custom.val_jsonl": None,
        "training.output_dir": str(output),
        "training.max_steps": options.warmup + options.steps,
        "training.per_device_train_batch_size": options.images,
        "training.learning_rate": LEARNING_RATE,
        "training.lr_scheduler_type": "constant",
        "training.warmup_steps": 0,
        "training.save_strategy": "no",
        "training.report_to": [],
        "training.resume_from_checkpoint": None,
    }
    if stage_2:
        values["rollout_matching.max_new_tokens"] = MAX_NEW_TOKENS
    else:
        values["custom.coord_soft_ce_w1.enabled"] = False
    config = load_config(asset(f"configs/demo/{'stage2' if stage_2 else 'sft'}.yaml"), values)
    marks, stopwatch = clock()
    trainer, _ = build_trainer(check_run(config), Console(stderr=True), output.name)
    trainer.add_callback(stopwatch())
    trainer.train()
    trainer.close()
    return marks


def conversations(folder: Path) -> list[dict[str, Any]]:
    """The lines of ms-swift's JSONL."""
    return [json.loads(line) for line in (folder / "swift.jsonl").read_text().splitlines()]


def our_prompt(folder: Path) -> tuple[int, ...]:
    """A scene's prompt as CoordExp asks it; scenes have one size, so it is the same for all."""
    from transformers import AutoProcessor

    from coordexp.data.jsonl import read_jsonl
    from coordexp.modeling.inputs import PromptEncoder

    record = next(iter(read_jsonl(folder / "scenes" / "scenes.jsonl")))
    return PromptEncoder(AutoProcessor.from_pretrained(start()), PROMPT, None).encode(record).prompt_token_ids


def check_prompts(folder: Path) -> Callable[[Any], None]:
    """A check of a peer's batch: nothing is compared that is not the same."""
    expected = our_prompt(folder)

    def check(batch: Any) -> None:
        for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
            check_prompt([token for token, kept in zip(row, mask, strict=True) if kept], expected)

    return check


def check_prompt(theirs: Sequence[int], expected: tuple[int, ...]) -> None:
    """Raises SystemExit unless a peer's ids begin with CoordExp's prompt."""
    if tuple(theirs[: len(expected)]) != expected:
        raise SystemExit(f"the peer asks with {tuple(theirs)[:24]}…, CoordExp with {expected[:24]}…")


def trl_sft(options: argparse.Namespace, output: Path, group: int) -> list[tuple[float, float]]:
    """TRL's SFTTrainer on prompt, completion and image; the loss is the completion's."""
    import torch
    from datasets import Dataset, Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
    from trl import SFTConfig, SFTTrainer

    lines = conversations(options.folder)
    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": PROMPT}] for _ in lines],
        "completion": [[line["messages"][1]] for line in lines],
        "images": [line["images"] for line in lines],
    }).cast_column("images", [Image()])  # fmt: skip
    marks = watch(check_prompts(options.folder))
    trainer = SFTTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(start(), dtype=torch.float32),
        args=SFTConfig(
            **trainer_settings(options, output), per_device_train_batch_size=options.images, max_length=None,
            completion_only_loss=True,
        ),
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(start()),
    )  # fmt: skip
    trainer.train()
    return marks


def trl_grpo(options: argparse.Namespace, output: Path, group: int) -> list[tuple[float, float]]:
    """TRL's GRPOTrainer: ``group`` sampled answers to an image, F1 as their reward."""
    import torch
    from datasets import Dataset, Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
    from trl import GRPOConfig, GRPOTrainer
    from trl.data_utils import prepare_multimodal_messages

    lines = conversations(options.folder)
    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": PROMPT}] for _ in lines],
        "image": [line["images"][0] for line in lines],
        "sample": list(range(len(lines))),
    }).cast_column("image", Image())  # fmt: skip
    marks = watch()
    trainer = GRPOTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(start(), dtype=torch.float32),
        reward_funcs=reward(options.folder),
        args=GRPOConfig(
            **trainer_settings(options, output), per_device_train_batch_size=options.images * group,
            num_generations=group, max_completion_length=MAX_NEW_TOKENS,
        ),
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(start(), padding_side="left"),
    )  # fmt: skip
    messages = prepare_multimodal_messages(dataset[0]["prompt"], [dataset[0]["image"]])
    theirs: Any = trainer._tokenize_prompts([messages])[0][0]
    check_prompt(theirs, our_prompt(options.folder))
    trainer.train()
    return marks


def reward(folder: Path) -> Callable[..., list[float]]:
    """F1 at IoU 0.5 against a scene's annotations, of answers as token ids."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.evaluation.answers import ImageAnswer, ScoredObject
    from coordexp.evaluation.detection import count_image
    from coordexp.modeling.load import load_vocab
    from coordexp.parsing import parse_rollout

    truth = [record.objects for record in read_jsonl(folder / "scenes" / "scenes.jsonl")]
    vocab = load_vocab(start())

    def f1(completion_ids: Sequence[Sequence[int]], sample: Sequence[int], **_: Any) -> list[float]:
        scores = []
        for ids, index in zip(completion_ids, sample, strict=True):
            found = parse_rollout(tuple(ids), vocab).objects
            counts = count_image(
                ImageAnswer(
                    sample_id=str(index), image="", width=1000, height=1000, gt=tuple(truth[index]),
                    pred=tuple(ScoredObject(obj.desc, obj.kind, obj.bins, None) for obj in found),
                    dropped={}, truncated=False, repeat_terminated=False, text="", num_tokens=len(ids),
                ),
                0.5,
            ).counts  # fmt: skip
            total = counts["pred"] + counts["gt"]
            scores.append(2 * counts["matched"] / total if total else 1.0)
        return scores

    return f1


def swift(options: argparse.Namespace, output: Path, group: int) -> list[tuple[float, float]]:
    """``swift sft`` or ``swift rlhf --rlhf_type grpo``, by the functions behind these commands."""
    import swift.trainers  # replaces transformers' default callbacks, so before the watch
    from swift.arguments import RLHFArguments, SftArguments
    from swift.pipelines import rlhf_main, sft_main
    from swift.template.templates.qwen import Qwen3VLTemplate
    from transformers import AutoTokenizer

    assert swift.trainers
    tokenizer = AutoTokenizer.from_pretrained(start())
    Qwen3VLTemplate.image_token_id = tokenizer.convert_tokens_to_ids(
        "<|image_pad|>"
    )  # a number of Qwen's own tokenizer
    common: dict[str, Any] = {
        **trainer_settings(options, output), "model": str(start()), "model_type": "qwen3_vl", "template": "qwen3_vl",
        "dataset": [str(options.folder / "swift.jsonl")], "split_dataset_ratio": 0.0, "tuner_type": "full",
        "torch_dtype": "float32", "attn_impl": "sdpa", "freeze_vit": False, "freeze_aligner": False,
        "freeze_llm": False, "system": None, "remove_unused_columns": False, "add_version": False,
        "load_from_cache_file": False, "dataset_num_proc": 1, "per_device_train_batch_size": options.images * group,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    if output.name.startswith("swift-sft"):
        marks = watch(check_prompts(options.folder))
        sft_main(SftArguments(**common))
        return marks
    marks = watch()  # its prompts are those of `swift sft`: the same template writes them
    from swift.rewards import ORM, orms

    f1 = reward(options.folder)

    class DetectionF1(ORM):
        def __call__(self, completions: Sequence[str], sample: Sequence[int], **_: Any) -> list[float]:
            return f1([tokenizer.encode(text, add_special_tokens=False) for text in completions], sample)

    orms["detection_f1"] = DetectionF1
    rlhf_main(
        RLHFArguments(
            **common, rlhf_type="grpo", reward_funcs=["detection_f1"], num_generations=group, beta=0.0,
            max_completion_length=MAX_NEW_TOKENS, use_vllm=False, log_completions=False,
        )
    )  # fmt: skip
    return marks


if __name__ == "__main__":
    main()
