"""Python's cost in an engine step that skips forced tokens: drafts, and the masks of drafted positions.

A GPU waits for both, because vLLM schedules steps with drafts one after the other. No model runs: each step accepts as
much of a draft as the answer has. Answers have boxes of COCO's names, in Qwen's tokenizer; the repeat guard is on. The
first round fills what drafts remember; medians are of the others, whose answers differ.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

NAMES = ("person", "car", "traffic light", "dog", "chair", "fire hydrant", "cup", "bicycle")
LIMIT = 32  # drafted tokens of one answer, as the engine has it
PROMPT = 1200  # tokens
COLUMNS = 8  # of the logits: the masks' own kernels are not what is measured


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--answers", type=positive, default=32, help="at once [32]")
    flags.add_argument("--objects", type=positive, default=10, help="boxes of each answer [10]")
    flags.add_argument("--rounds", type=positive, default=6, help="of all answers, the first not counted [6]")
    options = flags.parse_args(argv)
    console, threads, where = Console(), set_threads(options.threads), machine()
    print_machine(console, where, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        rounds = list(timed_rounds(Path(folder), options))
    counted = rounds[1:] or rounds
    results = {
        "passes": statistics.median(one["passes"] for one in counted),
        "tokens": statistics.median(one["tokens"] for one in counted),
        **{f"first_{key}": rounds[0][key] for key in ("propose_ms", "masks_ms")},
        **{key: statistics.median(one[key] for one in counted) for key in ("propose_ms", "masks_ms", "both_ms")},
    }
    table = Table("ms a step", "first round", "median", title=f"{options.answers} answers, {options.objects} objects")
    table.add_row("drafts", f"{results['first_propose_ms']:.2f}", f"{results['propose_ms']:.2f}")
    table.add_row("masks", f"{results['first_masks_ms']:.2f}", f"{results['masks_ms']:.2f}")
    table.add_row("both", "", f"{results['both_ms']:.2f}")
    console.print(table)
    write_json(options.json, "draft_steps", where, vars(options) | {"threads": threads}, results)


def timed_rounds(folder: Path, options: Any) -> Any:
    """Figures of one round after the other, with one drafter, as in an engine."""
    import torch

    from coordexp.config.rollout import RepeatTerminateConfig
    from coordexp.engine.wire.arguments import activation_environment
    from coordexp.engine.wire.engine_process import environment_kept
    from coordexp.engine.worker.drafting import TURN_START, AnswerDrafter, DraftedMasks
    from support.qwen_tokenizer import qwen_tokenizer, qwen_vocab

    qwen_tokenizer().save_pretrained(folder)
    vocab, drawn = qwen_vocab(), random.Random(0)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(tokenizer=str(folder), max_model_len=4096),
        speculative_config=SimpleNamespace(num_speculative_tokens=LIMIT),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
    )
    with environment_kept(activation_environment(RepeatTerminateConfig(enabled=True))):
        drafter, masks = AnswerDrafter(config), DraftedMasks(config, torch.device("cpu"))
    masks.known_tokens.num_known = COLUMNS
    prompt = [vocab.encode("a")[0]] * PROMPT + vocab.encode(f"{TURN_START}assistant\n")
    for number in range(options.rounds):
        answers = [_answer(vocab, drawn, options.objects) for _ in range(options.answers)]
        yield _timed_round(drafter, masks, prompt, answers, number)


def _answer(vocab: Any, drawn: random.Random, objects: int) -> list[int]:
    from coordexp.coords import serialize_objects
    from coordexp.records import GTObject

    boxes = [tuple(drawn.randrange(1000) for _ in range(4)) for _ in range(objects)]
    text = serialize_objects([GTObject(drawn.choice(NAMES), "bbox_2d", box) for box in boxes])
    return [*vocab.encode(text), vocab.eos_id]


def _timed_round(
    drafter: Any, masks: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]], number: int
) -> dict[str, float]:
    import torch
    from vllm import SamplingParams

    from coordexp.engine.wire.arguments import REQUEST_KEY

    count = len(answers)
    written: list[list[int]] = [[] for _ in answers]
    names = [f"{number}-{row}" for row in range(count)]
    requests = {
        name: SimpleNamespace(
            output_token_ids=answer, sampling_params=SamplingParams(extra_args={REQUEST_KEY: name})
        )
        for name, answer in zip(names, written, strict=True)
    }  # fmt: skip
    ids = np.zeros((count, len(prompt) + max(map(len, answers)) + LIMIT), dtype=np.int32)
    ids[:, : len(prompt)] = prompt
    drafts: Any = [[] for _ in answers]
    passes, spent = 0, {"propose": 0.0, "masks": 0.0}
    while any(len(done) < len(answer) for done, answer in zip(written, answers, strict=True)):
        live = [row for row in range(count) if len(written[row]) < len(answers[row])]
        lengths = [len(drafts[row]) for row in live]
        batch = SimpleNamespace(
            req_ids=[names[row] for row in live], spec_token_ids=[list(drafts[row]) for row in live]
        )
        nothing: Any = SimpleNamespace(sampled_token_ids=torch.full((len(live), LIMIT + 1), -1))
        runner = SimpleNamespace(input_batch=batch, requests=requests)
        logits, metadata = torch.zeros(sum(lengths) + len(live), COLUMNS), SimpleNamespace(num_draft_tokens=lengths)
        began = time.thread_time()
        masks.sample(runner, logits, metadata, lambda *_, output=nothing: output)
        spent["masks"] += time.thread_time() - began
        sampled: list[list[int]] = [[] for _ in answers]
        for row in live:
            ahead = answers[row][len(written[row]) :]
            right = next((k for k, token in enumerate(drafts[row]) if ahead[k : k + 1] != [token]), len(drafts[row]))
            sampled[row] = list(ahead[: right + 1])
            done = len(prompt) + len(written[row])
            ids[row, done : done + len(sampled[row])] = sampled[row]
            written[row].extend(sampled[row])
        ends = np.array([len(prompt) + len(answer) for answer in written])
        began = time.thread_time()
        drafts = drafter.propose(sampled, ends, ids)
        spent["propose"] += time.thread_time() - began
        passes += 1
    ms = {f"{key}_ms": 1e3 * seconds / passes for key, seconds in spent.items()}
    return {"passes": passes, "tokens": sum(map(len, answers)), **ms, "both_ms": sum(ms.values())}


if __name__ == "__main__":
    main()
