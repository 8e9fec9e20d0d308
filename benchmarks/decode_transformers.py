"""The gain of skipping forced tokens with transformers. Forward passes and boxes per second against ``generate``.

The same greedy answers at each batch size, by transformers' ``generate`` and with forced tokens skipped, in turn, in
one run. Then several answers per image, of which the first is greedy and the others are sampled by seeds.

transformers' own n-gram drafts (``prompt_lookup_num_tokens``) are not compared: in 5.19 they copy image placeholders
from the prompt into the draft, and Qwen3-VL's forward pass refuses those.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from reporting import machine, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

from coordexp.coords import CoordVocab
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.parsing import parse_rollout

MOST_TOKENS = 600  # of an answer


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", type=Path, default=Path("checkpoints/demo-stage1"), help="[checkpoints/demo-stage1]")
    flags.add_argument("--scenes", choices=sorted(SPECS), default="moderate", help="scenes to answer [moderate]")
    flags.add_argument("--images", type=positive, default=32, help="scenes to answer [32]")
    flags.add_argument("--batches", type=positive_list, default=[1, 8, 32], help="sequences at once [1,8,32]")
    flags.add_argument("--answers", type=positive_list, default=[4, 8], help="per image, at the last batch size [4,8]")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model [float32]")
    flags.add_argument("--rounds", type=positive, default=3, help="of all forms in turn [3]")
    options = flags.parse_args(argv)
    options.threads = set_threads(options.threads)
    console, where = Console(), machine()
    print_machine(console, where, threads=options.threads)
    loaded, requests = questions(options)
    results: list[dict[str, Any]] = []
    table = Table("batch", "answers", "tokens", "passes", "CPU s", "boxes/CPU s", "ratio", "equal")
    cases = [(batch, 1) for batch in options.batches] + [(options.batches[-1], count) for count in options.answers]
    for batch, count in cases:
        forms: dict[str, Callable[[], list[tuple[int, ...]]]] = {
            name: lambda skip=skip: answered(loaded, requests, batch, count, skip)  # noqa: B023
            for name, skip in (("every", False), ("skipping", True))
        }
        for one in compared(loaded, forms, options.rounds):
            one |= {"batch": batch, "answers_per_image": count}
            results.append(one)
            cells = (one["passes"], f"{one['cpu_s']:.2f}", f"{one['boxes_per_cpu_s']:.1f}")
            equal = f"{one['equal']}/{one['answers']}"
            table.add_row(str(batch), str(count), one["form"], *map(str, cells), f"{one['ratio']:.2f}", equal)
        write_json(options.json, "decode_transformers", where, vars(options), results, complete=False)
    console.print(table)
    write_json(options.json, "decode_transformers", where, vars(options), results)


def questions(options: Any) -> tuple[Any, list[Any]]:
    """The model, and a request for each scene."""
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import load_model

    loaded = load_model(options.model, options.dtype)
    loaded.model.eval()
    training = loaded.card.training
    encoder = PromptEncoder(loaded.processor, None if training is None else training.prompt, None)
    with tempfile.TemporaryDirectory() as folder:
        records = read_jsonl(write_scenes(Path(folder), options.images, SPECS[options.scenes], seed=7))
        return loaded, [encoder.encode(record) for record in records]


def answered(loaded: Any, requests: Sequence[Any], batch: int, count: int, skip: bool) -> list[tuple[int, ...]]:
    """Answers of CoordExp's backend: ``count`` to each request, ``batch`` at once."""
    from coordexp.rollouts import DatasetSeeds, RolloutRound
    from coordexp.rollouts.backend import DecodingOptions
    from coordexp.rollouts.hf import HFBackend

    options = DecodingOptions(MOST_TOKENS, 0.0 if count == 1 else 1.0, 1.0, -1, 1, 1.0)
    backend = HFBackend(loaded.model, loaded.vocab, options, batch, loaded.image_token_id, skip_forced_tokens=skip)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    images = max(1, batch // count)
    for first in range(0, len(requests), images):
        part = tuple(requests[first : first + images])
        rounds = [RolloutRound(part, DatasetSeeds(1, first, k, k), greedy=k == 0) for k in range(count)]
        for one in backend.generate_rounds(rounds):
            found[first + one.index, one.round_idx] = one.rollout.response_token_ids
    return [found[place] for place in sorted(found)]


def compared(loaded: Any, forms: dict[str, Callable[[], list[tuple[int, ...]]]], rounds: int) -> list[dict[str, Any]]:
    """Each form ``rounds`` times in turn; medians of CPU seconds, and how many times faster than the first form."""
    model, passes = loaded.model.model.language_model, 0
    forward = model.forward

    def counted(*args: Any, **keys: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args, **keys)

    model.forward = counted
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    answers: dict[str, list[tuple[int, ...]]] = {}
    passes_of: dict[str, int] = {}
    for _ in range(rounds):
        for name, form in forms.items():
            passes, began = 0, time.process_time()
            answers[name] = form()
            seconds[name].append(time.process_time() - began)
            passes_of[name] = passes
    model.forward = forward
    first = next(iter(forms))
    cpu_s = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        {
            "form": name, "passes": passes_of[name], "tokens": sum(map(len, answers[name])),
            "cpu_s": cpu_s[name], "ratio": cpu_s[first] / cpu_s[name],
            "boxes_per_cpu_s": boxes_in(answers[name], loaded.vocab) / cpu_s[name],
            "equal": sum(a == b for a, b in zip(answers[name], answers[first], strict=True)),
            "answers": len(answers[name]),
        }
        for name in forms
    ]  # fmt: skip


def boxes_in(answers: Sequence[tuple[int, ...]], vocab: CoordVocab) -> int:
    return sum(len(parse_rollout(ids, vocab, ended=len(ids) < MOST_TOKENS).objects) for ids in answers)


if __name__ == "__main__":
    main()
