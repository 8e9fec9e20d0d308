"""One variant of ``peers.py --shape`` in a process of its own: ``python peers_variant.py SPEC.json``.

Runs under the Python of the library that it trains with, so it imports only that library; CoordExp too where it is the
variant's own. Writes marks, losses and peak memory to the path that SPEC.json names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RATES = {"lora": 1e-4, "full": 1e-5}
LORA = {"rank": 16, "alpha": 32}
TEXT_LAYERS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class Watch:
    """Marks when training begins and after each optimizer step: clock, CPU seconds of the process; losses; the peak
    memory since ``warmup`` steps."""

    def __init__(self, warmup: int) -> None:
        from transformers import TrainerCallback

        watch = self
        self.marks: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.lengths: list[float] = []
        self.generating: list[float] = []
        self.parameters = 0

        class Stopwatch(TrainerCallback):
            def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
                watch.parameters = sum(one.numel() for one in model.parameters() if one.requires_grad)
                self.mark()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.mark()

            def mark(self) -> None:
                watch.marks.append((time.perf_counter(), time.process_time()))
                if len(watch.marks) == warmup + 1:
                    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here

            def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
                logs = logs or {}
                if "loss" in logs:
                    watch.losses.append(float(logs["loss"]))
                for key in ("completions/mean_length", "rollout/gen_new_tokens_mean"):
                    if key in logs:
                        watch.lengths.append(float(logs[key]))

        self.callback = Stopwatch

    def fix_length(self, tokens: int) -> None:
        """Give every answer that transformers generates ``tokens`` tokens, and add up the CPU seconds of each step's
        ``generate``. Random weights never end an answer; this makes sure of it."""
        from transformers import GenerationMixin

        mixin: Any = GenerationMixin
        generate = mixin.generate

        def of_one_length(model: Any, *positional: Any, **named: Any) -> Any:
            before = time.process_time()
            result = generate(model, *positional, **{**named, "min_new_tokens": tokens, "max_new_tokens": tokens})
            self.generating += [0.0] * (len(self.marks) - len(self.generating))
            self.generating[-1] += time.process_time() - before
            return result

        mixin.generate = of_one_length

    def report(self, packages: Sequence[str]) -> dict[str, Any]:
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return {
            "marks": self.marks, "losses": self.losses, "answer_tokens": self.lengths, "peak_gb": peak * 1024 / 1e9,
            "generate_s": self.generating,
            "trained_parameters": self.parameters, "packages": {name: metadata.version(name) for name in packages},
        }  # fmt: skip


def check_rows(spec: dict[str, Any]) -> Callable[[Any], None]:
    """A check of a peer's batch: it holds the same tokens as CoordExp's samples, and the same supervised ones."""
    expected = {tuple(ids): count for ids, count in spec["sequences"]}

    def check(batch: Any) -> None:
        parts = [batch[key].tolist() for key in ("input_ids", "attention_mask", "labels")]
        for row, kept, targets in zip(*parts, strict=True):
            ids = tuple(token for token, there in zip(row, kept, strict=True) if there)
            supervised = sum(target != -100 for target in targets)
            if expected.get(ids) != supervised:
                raise SystemExit(
                    f"not the same work: {len(ids)} tokens that end in {ids[-4:]}, {supervised} supervised; CoordExp's "
                    f"samples have {sorted((len(one), count, one[-4:]) for one, count in expected.items())}"
                )

    return check


def plain_strides(head: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As CoordExp's own model does: on a CPU, torch takes minutes to multiply a bfloat16 slice by a frozen head."""
    import torch

    return (args[0].clone(memory_format=torch.contiguous_format), *args[1:])


def watch_transformers(spec: dict[str, Any], check: Callable[[Any], None] | None = None) -> Watch:
    """Have every trainer of transformers that is built from now on report its steps; ``check`` gets a batch."""
    from transformers import TrainerCallback, trainer

    class FirstBatch(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, train_dataloader: Any = None, **__: Any) -> None:
            model.get_output_embeddings().register_forward_pre_hook(plain_strides)
            if check is not None:
                check(next(iter(train_dataloader)))

    watch = Watch(spec["warmup"])
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks += [FirstBatch, watch.callback]
    if spec["kind"] == "own":
        watch.fix_length(spec["answer_tokens"])
    return watch


def trainer_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """Settings of transformers' TrainingArguments that both peers get; the same as in :func:`coordexp`."""
    return {
        "output_dir": spec["output"], "max_steps": spec["warmup"] + spec["steps"],
        "learning_rate": RATES[spec["tuner"]],
        "per_device_train_batch_size": spec["batch"], "gradient_accumulation_steps": spec["accumulation"],
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused",
        "gradient_checkpointing": True, "bf16": spec["dtype"] == "bfloat16", "fp16": False, "use_cpu": True, "seed": 0,
        "save_strategy": "no",
        "report_to": [], "logging_steps": 1, "dataloader_num_workers": 0,
    }  # fmt: skip


def coordexp(spec: dict[str, Any]) -> dict[str, Any]:
    """Stage 1 with plain cross-entropy, or stage 2 with rewritten targets, from the shipped YAML."""
    from rich.console import Console

    from coordexp.config import load_config
    from coordexp.data.files import asset
    from coordexp.training.checked_run import check_run
    from coordexp.training.run import build_trainer

    stage_2, lora = spec["kind"] == "own", spec["tuner"] == "lora"
    values: dict[str, Any] = {
        "model.model": spec["checkpoint"], "model.dtype": spec["dtype"], "template.prompt": spec["prompt"],
        "custom.train_jsonl": spec["data"], "custom.val_jsonl": None, "data.num_workers": 0,
        "training.output_dir": spec["output"], "training.max_steps": spec["warmup"] + spec["steps"],
        "training.per_device_train_batch_size": spec["batch"],
        "training.effective_batch_size": spec["batch"] * spec["accumulation"],
        "training.learning_rate": RATES[spec["tuner"]], "training.vit_lr": None,
        "training.lr_scheduler_type": "constant", "training.warmup_steps": 0, "training.weight_decay": 0.0,
        "training.max_grad_norm": 1.0, "training.optim": "adamw_torch_fused",
        "training.bf16": spec["dtype"] == "bfloat16",
        "training.use_cpu": True, "training.gradient_checkpointing": True, "training.logging_steps": 1,
        "training.save_strategy": "no", "training.eval_strategy": "no", "training.report_to": [],
        "training.resume_from_checkpoint": None, "training.packing_min_fill_ratio": 0.01,
        "training.master_weights": "float32" if spec["masters"] else None,
    }  # fmt: skip
    if lora:
        values |= {
            "tuner.lora_rank": LORA["rank"], "tuner.lora_alpha": LORA["alpha"], "tuner.lora_dropout": 0.0,
            "tuner.freeze_vit": True, "tuner.freeze_aligner": True, "tuner.train_coord_rows": False,
        }  # fmt: skip
    if stage_2:
        values |= {
            "training.metric_for_best_model": None,
            "rollout_matching.max_new_tokens": spec["answer_tokens"],
            "rollout_matching.decode_batch_size": spec["batch"] * spec["accumulation"],
            "rollout_matching.decoding.temperature": 1.0, "rollout_matching.monitor_dump.enabled": False,
        }  # fmt: skip
    else:
        values["custom.coord_soft_ce_w1.enabled"] = False
    folder = "stage2_rollout_aligned" if stage_2 else "stage1"
    name = ("lora" if lora else "rewritten") if stage_2 else ("lora" if lora else "sft")
    config = load_config(asset(f"configs/{folder}/{name}.yaml"), values)
    watch = Watch(spec["warmup"])
    if stage_2:
        watch.fix_length(spec["answer_tokens"])
    trainer, _ = build_trainer(check_run(config), Console(stderr=True), spec["name"])
    trainer.add_callback(watch.callback())
    trainer.train()
    trainer.close()
    return watch.report(["coordexp", "torch", "transformers"])


def lines(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples as conversations, in ms-swift's format."""
    return [json.loads(line) for line in Path(spec["conversations"]).read_text().splitlines()]


def trl(spec: dict[str, Any]) -> dict[str, Any]:
    """TRL's SFTTrainer or GRPOTrainer."""
    import torch
    from datasets import Dataset, Image
    from peft import LoraConfig
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    samples = lines(spec)
    adapters: Any = None
    if spec["tuner"] == "lora":
        given = {"r": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0.0}
        adapters = LoraConfig(**given, target_modules=TEXT_LAYERS, task_type="CAUSAL_LM")
    columns: dict[str, Any] = {"prompt": [[{"role": "user", "content": spec["prompt"]}] for _ in samples]}
    columns["images"] = [one["images"] for one in samples]
    common: dict[str, Any] = {"peft_config": adapters}
    common["model"] = Qwen3VLForConditionalGeneration.from_pretrained(
        spec["checkpoint"], dtype=getattr(torch, spec["dtype"])
    )
    processor = AutoProcessor.from_pretrained(spec["checkpoint"])
    if spec["kind"] == "sft":
        columns["completion"] = [[one["messages"][1]] for one in samples]
        watch = watch_transformers(spec, check_rows(spec))
        trainer: Any = SFTTrainer(
            **common,
            args=SFTConfig(**trainer_settings(spec), max_length=None, completion_only_loss=True),
            train_dataset=Dataset.from_dict(columns).cast_column("images", [Image()]),
            processing_class=processor,
        )
    else:
        watch = watch_transformers(spec)
        processor.tokenizer.padding_side = "left"
        any_reward: Any = lambda completion_ids, **_: [sum(ids) % 101 / 100 for ids in completion_ids]  # noqa: E731
        trainer = GRPOTrainer(
            **common,
            reward_funcs=any_reward,
            args=GRPOConfig(
                **trainer_settings(spec), num_generations=spec["group"], max_completion_length=spec["answer_tokens"],
                temperature=1.0, beta=0.0,
            ),
            train_dataset=Dataset.from_dict(columns).cast_column("images", [Image()]),
            processing_class=processor,
        )  # fmt: skip
    trainer.train()
    return watch.report(["trl", "torch", "transformers"])


def swift(spec: dict[str, Any]) -> dict[str, Any]:
    """``swift sft`` or ``swift rlhf --rlhf_type grpo``, by the functions behind these commands."""
    import swift.trainers  # replaces transformers' default callbacks, so before the watch
    from swift.arguments import RLHFArguments, SftArguments
    from swift.pipelines import rlhf_main, sft_main
    from swift.rewards import ORM, orms
    from swift.template import TEMPLATE_MAPPING

    assert swift.trainers
    TEMPLATE_MAPPING["qwen3_vl"].suffix = ["<|im_end|>"]  # of the others' target; its own has a line break after it
    common: dict[str, Any] = {
        **trainer_settings(spec), "model": spec["checkpoint"], "model_type": "qwen3_vl", "template": "qwen3_vl",
        "dataset": [spec["conversations"]], "split_dataset_ratio": 0.0, "tuner_type": spec["tuner"],
        "torch_dtype": spec["dtype"], "attn_impl": "sdpa", "system": None, "remove_unused_columns": False,
        "add_version": False, "load_from_cache_file": False, "dataset_num_proc": 1,
    }  # fmt: skip
    if spec["tuner"] == "lora":
        common |= {
            "lora_rank": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0.0,
            "target_modules": ["all-linear"], "freeze_vit": True, "freeze_aligner": True,
        }  # fmt: skip
    else:
        common |= {"freeze_vit": False, "freeze_aligner": False, "freeze_llm": False}
    if spec["kind"] == "sft":
        watch = watch_transformers(spec, check_rows(spec))
        sft_main(SftArguments(**common))
    else:
        watch = watch_transformers(spec)

        class AnyReward(ORM):
            def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
                return [sum(text.encode()) % 101 / 100 for text in completions]

        orms["any"] = AnyReward
        rlhf_main(
            RLHFArguments(
                **common, rlhf_type="grpo", reward_funcs=["any"], num_generations=spec["group"], beta=0.0,
                max_completion_length=spec["answer_tokens"], temperature=1.0, use_vllm=False, log_completions=False,
            )
        )  # fmt: skip
    return watch.report(["ms_swift", "torch", "transformers"])


if __name__ == "__main__" and len(sys.argv) > 1:  # without SPEC.json it runs nothing
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    given = json.loads(Path(sys.argv[1]).read_text())
    run = {"coordexp": coordexp, "trl": trl, "swift": swift}[given["family"]]
    Path(given["result"]).write_text(json.dumps(run(given)))
