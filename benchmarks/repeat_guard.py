"""The cost of the repeat guard, and its savings.

Cost: the seconds spent inside the guard, against the seconds of the same real decoding run by transformers, with limits
that are never reached, so that every token of every answer is checked. Savings: tokens and time of a model that
repeats itself, guarded with the default limits and unguarded. A second table times the guard alone, with the rule on
object keys too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

from coordexp.config.rollout import RepeatTerminateConfig, RolloutMatchingConfig
from coordexp.coords import serialize_objects
from coordexp.data.dataset import RecordDataset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.records import GTObject, Rollout, RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.backend import decoding_options
from coordexp.rollouts.hf import HFBackend, RepetitionStopProcessor
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard

NEVER = 10**9
ALL_RULES = RepeatTerminateConfig(
    enabled=True, min_new_tokens=0, max_consecutive_token_repeats=NEVER, ngram_repeats=NEVER, max_object_keys=NEVER
)
DEFAULTS = RepeatTerminateConfig(enabled=True)
# Two layers with random matrices four times their usual size: greedy answers then repeat themselves.
REPEATING = TinySpec(hidden=64, layers=2, heads=2, kv_heads=1, mlp=96)
SHARPEN = 4.0


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--batch", type=positive, default=32, help="sequences decoded at once [32]")
    flags.add_argument("--tokens", type=positive, default=3000, help="new tokens of each [3000]")
    flags.add_argument("--saved-tokens", type=positive, default=600, help="longest answer of the repeating model [600]")
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads)
    where = machine()
    print_machine(console, where, batch=options.batch, tokens=options.tokens, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(build_tiny_checkpoint(Path(folder) / "model"), "float32")
        requests = prompts(loaded, Path(folder) / "scenes", options.batch)
        alone = guard_alone(loaded, options.batch * options.tokens)
        cost = share_of_decoding(loaded, requests, options.tokens)
        repeating = load_model(build_tiny_checkpoint(Path(folder) / "repeating", seed=5, spec=REPEATING), "float32")
        saved = tokens_saved(repeating, requests, options.saved_tokens)
    console.print(_table(alone, cost, saved))
    results = {"alone": alone, "cost": cost, "saved": saved}
    write_json(options.json, "repeat_guard", where, {**vars(options), "threads": threads}, results)


def prompts(loaded: LoadedModel, folder: Path, count: int) -> list[RolloutRequest]:
    from coordexp.data.jsonl import read_jsonl

    records = read_jsonl(write_scenes(folder, min(count, 8), SPARSE, seed=0))
    dataset = RecordDataset(records, PromptEncoder(loaded.processor, "Detect.", None).encode)
    return [dataset[index % len(records)].request for index in range(count)]


def guard_alone(loaded: LoadedModel, count: int) -> dict[str, float]:
    """Microseconds per token of the guard itself, over an answer of real structure."""
    scene = [GTObject(f"cat {n}", "bbox_2d", (n, n + 1, n + 2, n + 3)) for n in range(60)]
    answer = loaded.vocab.encode(serialize_objects(scene))
    stream = (answer * (count // len(answer) + 1))[:count]
    reader = ObjectKeyReader(loaded.vocab.pieces)
    figures = {}
    for name, settings in {
        "runs and n-grams": ALL_RULES.model_copy(update={"max_object_keys": None}),
        "and object keys": ALL_RULES,
    }.items():
        guard = RepeatGuard(settings, reader)
        started = time.perf_counter()
        for token in stream:
            guard.push(token)
        figures[name] = 1e6 * (time.perf_counter() - started) / count
        assert guard.trigger is None
    return figures


def share_of_decoding(loaded: LoadedModel, requests: Sequence[RolloutRequest], tokens: int) -> dict[str, float]:
    """Seconds in the guard and seconds of the whole decoding that it was part of."""
    spent = 0.0
    judge = RepetitionStopProcessor.__call__

    def timed(self: RepetitionStopProcessor, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        started = time.perf_counter()
        result = judge(self, input_ids, scores)
        spent += time.perf_counter() - started
        return result

    RepetitionStopProcessor.__call__ = timed
    try:
        rollouts, seconds = decode(loaded, requests, tokens, ALL_RULES)
    finally:
        RepetitionStopProcessor.__call__ = judge
    assert not any(rollout.repeat_terminated for rollout in rollouts)
    written = sum(len(rollout.response_token_ids) for rollout in rollouts)
    return {
        "tokens": written,
        "decode_s": seconds,
        "guard_s": spent,
        "guard_us_per_token": 1e6 * spent / written,
        "share": spent / seconds,
    }


def tokens_saved(loaded: LoadedModel, requests: Sequence[RolloutRequest], tokens: int) -> dict[str, Any]:
    """A model that repeats itself, with the default limits and without."""
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(SHARPEN)
    free, free_s = decode(loaded, requests, tokens, None)
    guarded, guarded_s = decode(loaded, requests, tokens, DEFAULTS)
    written = [sum(len(rollout.response_token_ids) for rollout in one) for one in (free, guarded)]
    return {
        "tokens_free": written[0],
        "tokens_guarded": written[1],
        "saved_share": 1 - written[1] / written[0],
        "sequences_ended": sum(rollout.repeat_terminated for rollout in guarded),
        "sequences": len(guarded),
        "free_s": free_s,
        "guarded_s": guarded_s,
    }


def decode(
    loaded: LoadedModel, requests: Sequence[RolloutRequest], tokens: int, settings: RepeatTerminateConfig | None
) -> tuple[list[Rollout], float]:
    options = decoding_options(RolloutMatchingConfig(max_new_tokens=tokens))
    backend = HFBackend(loaded.model, loaded.vocab, options, len(requests), loaded.image_token_id, settings)
    started = time.perf_counter()
    rollouts = backend.generate(requests, SeedContext(0, 0, 0, 0))
    return rollouts, time.perf_counter() - started


def _table(alone: dict[str, float], cost: dict[str, float], saved: dict[str, Any]) -> Table:
    table = Table("figure", "value", title="repeat guard", title_justify="left")
    for name, value in alone.items():
        table.add_row(f"guard alone, {name}", f"{value:.2f} µs a token")
    table.add_row("decoding, every rule on", f"{cost['tokens']:,.0f} tokens in {cost['decode_s']:.1f} s")
    table.add_row("of that in the guard", f"{cost['guard_s']:.2f} s, {cost['guard_us_per_token']:.2f} µs a token")
    table.add_row("share of decoding", f"{100 * cost['share']:.2f} %")
    table.add_row(
        "repeating model, default limits",
        f"{saved['tokens_guarded']:,} instead of {saved['tokens_free']:,} tokens "
        f"({100 * saved['saved_share']:.0f} % saved), {saved['sequences_ended']} of {saved['sequences']} answers ended",
    )
    table.add_row("its decoding", f"{saved['guarded_s']:.1f} s instead of {saved['free_s']:.1f} s")
    return table


if __name__ == "__main__":
    main()
