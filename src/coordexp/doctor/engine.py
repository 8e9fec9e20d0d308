"""vLLM: weight pushes into an engine of this process, of two processes and of a server; answers against transformers';
speed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from coordexp import distributed
from coordexp.checkpoints.card import read_card
from coordexp.config import RunConfig, resolved_rollout, resolved_yaml
from coordexp.config.schema import TunerConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import read_jsonl
from coordexp.doctor.check import Row, Settings, attempted, compared, judged, measured
from coordexp.doctor.samples import answering_model, config_of
from coordexp.engine.trainer.backends import build_backend
from coordexp.engine.trainer.colocated import ColocatedBackend, ColocatedPusher, InProcessEngine
from coordexp.engine.trainer.push import ServerPusher, WeightPusher
from coordexp.engine.trainer.server_backend import make_clients
from coordexp.engine.wire.engine_process import DIE_WITH_PARENT, VISIBLE
from coordexp.errors import RolloutError
from coordexp.modeling.adapter import tune
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.scores import logits_of_answer
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.parsing import parse_rollout
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.training.parallel import join_processes

BATCHES = (1, 8, 64)  # answers that are decoded together
AT_ONCE = {True: 64, False: 8}  # the most, on a GPU and on a CPU
FEWEST = 4  # answers in a measurement
SEEDS = SeedContext(1, 0, 0, 0)
PUSHES = 10
CHANGE, LORA_CHANGE = 1e-4, 1e-2  # standard deviation of the noise on trained weights before each push
TOKENS = {True: 256, False: 96}  # of an answer, on a GPU and on a CPU
# A token is a near tie if its logit is not further from the best one, in standard deviations of the position's logits.
# Other weights give tokens that are further away.
TIE = {"float32": 0.01, "bfloat16": 0.25}
FAR_SHARE = 0.01  # of tokens that may be neither the best nor a near tie
LORA = TunerConfig(train_type="lora", lora_rank=8, lora_alpha=16)
PIXEL_LIMIT = {"float32": 1e-3, "bfloat16": 2e-2}
PIXELS_ADVICE = "vLLM sees other pixels than the trainer: install the tested versions, and report this table"
BOOT_S, _POLL_S = 400.0, 1.0
_REPORT = "write rollout_matching.rollout_backend: hf, and report this table"
_ADVICE = f"answers would not be the trained model's: {_REPORT}"


def colocated(settings: Settings) -> Iterator[Row]:
    """One engine that decodes token by token, for pushes, answers and speed."""
    compiled, started = _compiled(), time.perf_counter()
    config, loaded, backend = _start(settings)
    with closing(backend):
        yield _start_row("engine", time.perf_counter() - started, compiled)
        engine, full, merged = backend.engine, Pushes(), Pushes()
        yield attempted("ten pushes, full", _ADVICE, full.fill, backend.pusher, loaded.model, CHANGE, engine)
        lora = _load(config)
        tune(lora.model, LORA, lora.vocab.coord_token_ids)
        pusher = _pusher(config, lora, engine)
        yield attempted("ten pushes, LoRA merged", _ADVICE, merged.fill, pusher, lora.model, LORA_CHANGE, engine)
        del lora, pusher
        yield full.sleep_row("sleep and wake")
        yield merged.sleep_row("sleep and wake, LoRA")

        loaded = _load(config)  # without the noise of the pushes
        _pusher(config, loaded, engine).push(PUSHES)
        requests = _requests(settings, loaded)
        yield attempted("pixels, first layer", PIXELS_ADVICE, _first_layer, settings, loaded, backend)
        yield attempted("vLLM = transformers", _ADVICE, _agreement, loaded, requests, backend)
        yield from decoding_rates(settings, "decoding", loaded, requests, backend)
        yield full.speed_row("push")


def skipping(settings: Settings) -> Iterator[Row]:
    """An engine that skips forced tokens, with the same requests as :func:`colocated`'s."""
    compiled, started = _compiled(), time.perf_counter()
    _, loaded, backend = _start(settings, skip_forced_tokens=True)
    with closing(backend):
        yield _start_row("engine, skipping", time.perf_counter() - started, compiled)
        requests = _requests(settings, loaded)
        yield attempted("skipping = transformers", _ADVICE, _agreement, loaded, requests, backend)
        yield from decoding_rates(settings, "skipping", loaded, requests, backend)
    yield which_is_faster(settings)


def tensor_parallel(settings: Settings) -> Iterator[Row]:
    """One engine over two processes."""
    _, loaded, backend = _start(settings, 2)
    with closing(backend):
        yield Pushes().fill("TP 2: ten pushes", backend.pusher, loaded.model, CHANGE, backend.engine)
        requests = _requests(settings, loaded)
        yield _agreement("TP 2: vLLM = transformers", loaded, requests, backend)


def served(settings: Settings) -> Iterator[Row]:
    """``coordexp serve`` on the second GPU, pushed to from the first; or both on the CPU."""
    with ExitStack() as held:
        ports = []
        for _ in range(2):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    entry = {"base_url": f"http://127.0.0.1:{ports[0]}", "group_port": ports[1]}
    config = _config(settings, "server.yaml", rollout_matching__vllm__server__servers=[entry])
    file = settings.folder / "server.yaml"
    file.write_text(resolved_yaml(config), encoding="utf-8")
    environment = os.environ | {VISIBLE: os.environ[VISIBLE].split(",")[-1], DIE_WITH_PARENT: "1"}
    server = subprocess.Popen([sys.executable, "-m", "coordexp", "serve", str(file)], env=environment)
    (client,) = make_clients(resolved_rollout(config))
    with closing(client):
        deadline = time.monotonic() + BOOT_S
        while True:
            try:
                client.health()
                break
            except RolloutError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
        loaded = _load(config)
        pusher = ServerPusher([client], TrainerWeights(loaded.model), resolved_rollout(config).vllm.sync)
        with closing(pusher):
            yield Pushes().fill("server: ten pushes", pusher, loaded.model, CHANGE)
    server.terminate()
    server.wait(BOOT_S)


@dataclass
class Pushes:
    """Ten pushes, each of changed weights and with checksums, on GPUs each after the engine slept and woke up."""

    num_bytes: int = 0
    push_s: list[float] = field(default_factory=list)
    sleep_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)

    def fill(
        self, check: str, pusher: WeightPusher, model: Any, change: float, engine: InProcessEngine | None = None
    ) -> Row:
        """``engine``: the one that sleeps in between. Raises RolloutError for other weights in an engine."""
        for version in range(PUSHES):
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(version)  # the same on all ranks
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(change * torch.randn_like(parameter))
            if engine is not None:
                self.sleep_s.append(_seconds(lambda: engine.sleep(1)))
                self.wake_s.append(_seconds(lambda: engine.wake_up(["weights"])))
            report = pusher.push(version)
            if engine is not None:
                self.wake_s[-1] += _seconds(lambda: engine.wake_up(["kv_cache"]))
            if report.checksum is None:
                raise RolloutError(f"push {version} was not compared with the engine's weights")
            self.num_bytes = report.bytes
            self.push_s.append(report.seconds)
        figure = f"{len(self.push_s)} checksums equal; {self.num_bytes / 1e6:,.0f} MB in {median(self.push_s):.2f} s"
        return measured(check, figure, bytes=self.num_bytes, seconds=median(self.push_s))

    def speed_row(self, check: str) -> Row:
        if not self.push_s:
            return Row(check, "skipped", "no push succeeded")
        rate = self.num_bytes / median(self.push_s)
        return measured(check, f"{rate / 1e9:.2f} GB/s, checksums included", bytes_per_s=rate)

    def sleep_row(self, check: str) -> Row:
        if not torch.cuda.is_available():
            return Row(check, "skipped", "vLLM does not sleep on CPUs")
        if not self.wake_s:
            return Row(check, "skipped", "the engine did not sleep before a push")
        sleep, wake = median(self.sleep_s), median(self.wake_s)
        figure = f"{sleep:.2f} s to sleep, {wake:.2f} s to wake; around each push above"
        return measured(check, figure, sleep_s=sleep, wake_s=wake)


def _config(settings: Settings, file: str, **keys: Any) -> RunConfig:
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    if not on_gpu:  # starting takes minutes otherwise
        keys["rollout_matching__vllm__enforce_eager"] = True
        keys["rollout_matching__vllm__engine_args__max_num_batched_tokens"] = 1024
    return config_of(
        settings, f"stage2_rollout_aligned/{file}", answering_model(settings), "scenes",
        model__dtype=dtype, training__master_weights=None, training__bf16=on_gpu, training__use_cpu=not on_gpu,
        global_max_length=4096 if on_gpu else 1024, rollout_matching__decode_batch_size=AT_ONCE[on_gpu],
        rollout_matching__max_new_tokens=TOKENS[on_gpu], rollout_matching__vllm__dtype=dtype,
        rollout_matching__vllm__sync__checksum_every=1, **keys,
    )  # fmt: skip


def _load(config: RunConfig) -> LoadedModel:
    loaded = load_model(config.model.model, config.model.dtype)
    model: Any = loaded.model.eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return loaded


def _start(
    settings: Settings, tensor_parallel_size: int = 1, *, skip_forced_tokens: bool = False
) -> tuple[RunConfig, LoadedModel, ColocatedBackend]:
    config = _config(
        settings, "colocate.yaml", rollout_matching__vllm__tensor_parallel_size=tensor_parallel_size,
        rollout_matching__decoding__skip_forced_tokens=skip_forced_tokens,
    )  # fmt: skip
    join_processes(config)
    loaded = _load(config)
    backend = build_backend(resolved_rollout(config), loaded.parts())
    assert isinstance(backend, ColocatedBackend)
    backend.sync_weights(0)
    return config, loaded, backend


def _pusher(config: RunConfig, loaded: LoadedModel, engine: InProcessEngine) -> ColocatedPusher:
    pusher = ColocatedPusher(TrainerWeights(loaded.model), resolved_rollout(config).vllm.sync)
    pusher.engine = engine
    return pusher


def _compiled() -> set[str]:
    """Models in vLLM's cache of compiled ones."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    return {path.name for path in (root / "torch_compile_cache").glob("*")}


def _start_row(check: str, seconds: float, compiled: set[str]) -> Row:
    is_cold = bool(_compiled() - compiled)
    how = "compiled the model; the next start finds it" if is_cold else "compiled nothing new"
    return measured(check, f"ready in {seconds:.0f} s, {how}", seconds=seconds, compiled=is_cold)


@torch.no_grad()
def _first_layer(check: str, settings: Settings, loaded: LoadedModel, backend: ColocatedBackend) -> Row:
    """The vision tower's patch embedding of one photograph, by the trainer and by the engine, each from its own
    pixels."""
    record = read_jsonl(settings.folder / "large_scenes" / "scenes.jsonl")[0]
    request = _encoder(settings, loaded).encode(record)
    rendered = backend.engine.render(backend.prompt_of("pixels", 0, request), open_rgb)
    (image,) = rendered["mm_kwargs"]["image"]

    def in_the_engine(worker: Any) -> torch.Tensor:
        tower = worker.model_runner.get_model().visual
        # vLLM's pixels are bytes, which its tower normalises on its device.
        pixels = tower.input_norm(image["pixel_values"].data.to(tower.device), tower.dtype)
        return tower.patch_embed(pixels).float().cpu()

    model: Any = loaded.model
    tower = model.model.visual
    pixels = model.model.pixel_scale(request.model_inputs["pixel_values"].to(tower.device), tower.dtype)
    ours, seen = tower.patch_embed(pixels).float().cpu(), backend.engine.ask_worker(in_the_engine)
    error = float((ours - seen.reshape(ours.shape)).norm() / ours.norm())
    limit = PIXEL_LIMIT[str(model.dtype).removeprefix("torch.")]
    note = f"of {len(ours):,} patches of a photograph of {record.width} x {record.height}, trainer and vLLM"
    return compared(check, error, limit, PIXELS_ADVICE, note)


def _requests(settings: Settings, loaded: LoadedModel) -> list[RolloutRequest]:
    records = read_jsonl(settings.folder / "scenes" / "scenes.jsonl")
    dataset = RecordDataset(records, _encoder(settings, loaded).encode)
    return [dataset[index].request for index in range(len(dataset))]


def _encoder(settings: Settings, loaded: LoadedModel) -> PromptEncoder:
    trained = read_card(answering_model(settings)).training
    return PromptEncoder(loaded.processor, *((None, None) if trained is None else (trained.prompt, trained.system)))


@torch.no_grad()
def _agreement(check: str, loaded: LoadedModel, requests: Sequence[RolloutRequest], backend: ColocatedBackend) -> Row:
    """Whether each token of greedy answers is the one that transformers finds most likely after the same tokens."""
    rollouts = backend.generate(requests, SEEDS)
    model, vocab = loaded.model, loaded.vocab
    dtype = str(model.dtype).removeprefix("torch.")
    same = far = total = 0
    first = ""
    for request, rollout in zip(requests, rollouts, strict=True):
        answer = [*rollout.response_token_ids, *([] if rollout.truncated else [vocab.eos_id])]
        logits_TV = logits_of_answer(model, loaded.image_token_id, request, answer, len(answer) + 1)[:-1]
        known_TV = logits_TV[:, : len(vocab)].float()  # a padded head has rows without a token
        best_T, token_T = known_TV.max(-1).values, torch.tensor(answer, device=logits_TV.device)
        gap_T = (best_T - known_TV.gather(1, token_T[:, None])[:, 0]) / known_TV.std(-1)
        total += len(answer)
        same += int((gap_T == 0).sum())
        far += int((gap_T > TIE[dtype]).sum())
        if not first and bool((gap_T > 0).any()):
            at = int((gap_T > 0).nonzero()[0])
            ours, theirs = (vocab.decode([token]) for token in (answer[at], int(known_TV[at].argmax())))
            first = f"; first difference in {request.sample_id}, token {at}: vLLM {ours!r}, transformers {theirs!r}"
    same, far, total = (int(value) for value in distributed.all_reduce([same, far, total], "sum"))
    figure = f"{same} of {total} tokens equal in {dtype}, {total - same - far} near ties{first}"
    is_near = total > 0 and far <= FAR_SHARE * total
    return judged(check, is_near, figure, _ADVICE, equal=same / max(1, total), far=far / max(1, total))


def decoding_rates(
    settings: Settings, check: str, loaded: LoadedModel, requests: Sequence[RolloutRequest], backend: ColocatedBackend
) -> Iterator[Row]:
    """Rates at each number of answers at once; they are kept for :func:`which_is_faster`."""
    rates: dict[int, float] = {}
    for at_once in BATCHES:
        name = f"{check}, {at_once} at once"
        row = Row(name, "skipped", "needs a GPU")
        if at_once <= AT_ONCE[torch.cuda.is_available()]:
            row = attempted(name, _REPORT, _rate, at_once, loaded, requests, backend)
        if row.result == "ok":
            rates[at_once] = row.numbers["tokens_per_s"]
        yield row
    (settings.folder / f"{check}.json").write_text(json.dumps(rates), encoding="utf-8")


def _rate(
    check: str, at_once: int, loaded: LoadedModel, requests: Sequence[RolloutRequest], backend: ColocatedBackend
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


def _seconds(act: Any) -> float:
    started = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
