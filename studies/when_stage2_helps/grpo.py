"""A control: GRPO as users run it today, TRL's trainer with a detection reward, from the same start and data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT = "Detect every object."  # as configs/base.yaml
REWARD_IOUS = (0.5, 0.7, 0.9)


def train(data: Path, model: Path, output: Path, seed: int, arm: dict[str, Any]) -> float:
    """Train by ``arm``: ``steps`` of ``prompts`` images, each answered ``group`` times at temperature 1, at learning
    rate ``lr``. Everything else is TRL's default; TRL comes with ms-swift. Returns: CPU seconds of training alone."""
    import torch
    from datasets import Dataset, Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
    from trl import GRPOConfig, GRPOTrainer

    from coordexp.data.jsonl import read_jsonl
    from coordexp.modeling.load import load_vocab

    records = read_jsonl(data)
    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": PROMPT}] for _ in records],
        "image": [str(record.image) for record in records],
        "sample": list(range(len(records))),
    }).cast_column("image", Image())  # fmt: skip
    settings = GRPOConfig(
        output_dir=str(output / "trl"),
        max_steps=arm["steps"],
        learning_rate=arm["lr"],
        per_device_train_batch_size=arm["prompts"] * arm["group"],
        num_generations=arm["group"],
        max_completion_length=arm["set"].get("rollout_matching.max_new_tokens", 192),  # as configs/base.yaml
        lr_scheduler_type="cosine",
        warmup_steps=8,
        adam_beta2=0.98,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        report_to=[],
        logging_steps=10,
    )
    policy = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=_reward([record.objects for record in records], load_vocab(model)),
        args=settings,
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
    )
    _check_prompt(trainer, dataset[0], records[0], model)
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    # Tokenizer, processor, how images are prepared; not the note that the start is trained.
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("cpu_seconds.json"), dirs_exist_ok=True)
    policy.save_pretrained(output)
    return seconds


def _check_prompt(trainer: Any, row: dict[str, Any], record: Any, model: Path) -> None:
    """TRL's prompt is token by token the one that every other arm trains with, or the comparison would be none."""
    from trl.data_utils import prepare_multimodal_messages

    from coordexp.modeling.inputs import PromptEncoder

    messages = prepare_multimodal_messages(row["prompt"], [row["image"]])
    ids = trainer._tokenize_prompts([messages])[0][0]
    ours = PromptEncoder(trainer.processing_class, PROMPT, None).encode(record).prompt_token_ids
    if tuple(ids) != ours:
        raise SystemExit(f"{model}: TRL asks with {tuple(ids)[:20]}…, every other arm with {ours[:20]}…")


def _reward(truth: Sequence[Sequence[Any]], vocab: Any) -> Callable[..., list[float]]:
    """F1 against the annotations of one image, equal descriptions, mean over :data:`REWARD_IOUS`; 1 where both are
    empty."""
    from coordexp.evaluation.answers import ImageAnswer, ScoredObject
    from coordexp.evaluation.detection import count_image
    from coordexp.parsing import parse_rollout

    def reward(completion_ids: Sequence[Sequence[int]], sample: Sequence[int], **_: Any) -> list[float]:
        scores = []
        for ids, index in zip(completion_ids, sample, strict=True):
            found = parse_rollout(tuple(ids), vocab).objects
            answer = ImageAnswer(
                sample_id=str(index), image="", width=1000, height=1000, gt=tuple(truth[index]),
                pred=tuple(ScoredObject(obj.desc, obj.kind, obj.bins, None) for obj in found),
                dropped={}, truncated=False, repeat_terminated=False, text="", num_tokens=len(ids),
            )  # fmt: skip
            each = []
            for iou in REWARD_IOUS:
                counts = count_image(answer, iou).counts
                total = counts["pred"] + counts["gt"]
                each.append(2 * counts["matched"] / total if total else 1.0)
            scores.append(sum(each) / len(each))
        return scores

    return reward
