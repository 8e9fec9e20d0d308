"""Speed of an engine's answers, token by token and with forced tokens skipped, and which of both to choose."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from coordexp.doctor.check import Row, Settings, attempted, measured
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.modeling.load import LoadedModel
from coordexp.parsing import parse_rollout
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext

BATCHES = (1, 8, 64)  # answers that are decoded together
AT_ONCE = {True: 64, False: 8}  # the most, on a GPU and on a CPU
FEWEST = 4  # answers in a measurement
SEEDS = SeedContext(1, 0, 0, 0)
ADVICE = "write rollout_matching.rollout_backend: hf, and report this table"


def decoding_rates(
    settings: Settings, check: str, loaded: LoadedModel, requests: Sequence[RolloutRequest], backend: ColocatedBackend
) -> Iterator[Row]:
    """Rates at each number of answers at once; they are kept for :func:`which_is_faster`."""
    found: dict[int, float] = {}
    for at_once in BATCHES:
        row = f"{check}, {at_once} at once"
        if at_once > AT_ONCE[torch.cuda.is_available()]:
            yield Row(row, "skipped", "needs a GPU")
        else:
            yield attempted(row, ADVICE, _rate, at_once, loaded, requests, backend, found)
    (settings.folder / f"{check}.json").write_text(json.dumps(found), encoding="utf-8")


def _rate(
    check: str,
    at_once: int,
    loaded: LoadedModel,
    requests: Sequence[RolloutRequest],
    backend: ColocatedBackend,
    found: dict[int, float],
) -> Row:
    count = max(at_once, FEWEST)
    many = [requests[number % len(requests)] for number in range(count)]
    backend.engine.max_in_flight = at_once
    backend.generate(many[:at_once], SEEDS)
    started = time.perf_counter()
    rollouts = backend.generate(many, SEEDS)
    seconds = time.perf_counter() - started
    tokens = sum(len(rollout.response_token_ids) for rollout in rollouts)
    parsed = [parse_rollout(one.response_token_ids, loaded.vocab, ended=not one.truncated) for one in rollouts]
    boxes = sum(len(one.objects) for one in parsed)
    found[at_once] = tokens / seconds
    figure = f"{tokens / seconds:,.0f} tokens/s, {boxes / seconds:,.1f} boxes/s"
    return measured(check, figure, tokens_per_s=tokens / seconds, boxes_per_s=boxes / seconds, boxes=boxes)


def which_is_faster(settings: Settings) -> Row:
    """Compare the rates with and without."""
    files = [settings.folder / f"{name}.json" for name in ("decoding", "skipping")]
    plain, skipped = (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files)
    times = {int(at_once): skipped[at_once] / plain[at_once] for at_once in plain if at_once in skipped}
    if not times:
        return Row("skip_forced_tokens", "skipped", "no speed was measured with and without")
    return measured(
        "skip_forced_tokens", advice_to_skip(times), **{f"at_{at_once}": ratio for at_once, ratio in times.items()}
    )


def advice_to_skip(times: Mapping[int, float]) -> str:
    """What to write for ``rollout_matching.decoding.skip_forced_tokens``. ``times``: answers at once → how many times
    as fast skipping is."""
    listed = ", ".join(f"{ratio:.2f} times as fast at {at_once}" for at_once, ratio in sorted(times.items()))
    faster = [at_once for at_once, ratio in times.items() if ratio > 1]
    if len(faster) == len(times):
        return f"write true: {listed}"
    if not faster:
        return f"write false: {listed}"
    return f"write true for decode_batch_size up to {max(faster)}, false above: {listed}"
