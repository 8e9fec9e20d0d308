"""vLLM: weight pushes into an engine of this process, of two processes and of a server; answers against transformers';
speed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from coordexp import distributed
from coordexp.config import RunConfig, resolved_rollout, resolved_yaml
from coordexp.config.schema import TunerConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import read_jsonl
from coordexp.doctor.check import VISIBLE, Row, Settings, judged, measured
from coordexp.doctor.samples import config_of, model_of
from coordexp.engine import build_backend
from coordexp.engine.colocated import ColocatedBackend, ColocatedPusher, InProcessEngine
from coordexp.engine.engine_process import DIE_WITH_PARENT
from coordexp.engine.push import ServerPusher, WeightPusher
from coordexp.engine.server_backend import make_clients
from coordexp.errors import RolloutError
from coordexp.modeling.adapter import tune
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.weights import LearnerWeights
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.learner import LearnerParts
from coordexp.training.parallel import join_processes

PUSHES = 10
CHANGE, LORA_CHANGE = 1e-4, 1e-2  # standard deviation of the noise on trained weights before each push
TOKENS = {True: 256, False: 32}  # of an answer, on a GPU and on a CPU
AT_ONCE = {True: 64, False: 8}  # answers that are decoded together
# A token is a near tie if its logit is not further from the best one, in standard deviations of the position's logits.
# Other weights give tokens that are further away.
TIE = {"float32": 0.01, "bfloat16": 0.25}
FAR_SHARE = 0.01  # of tokens that may be neither the best nor a near tie
LORA = TunerConfig(train_type="lora", lora_rank=8, lora_alpha=16)
SEEDS = SeedContext(1, 0, 0, 0)
BOOT_S, POLL_S = 400.0, 1.0
_ADVICE = "answers would not be the trained model's: write rollout_matching.rollout_backend: hf, and report this table"


def colocated(settings: Settings) -> Iterator[Row]:
    """One engine for pushes, answers and speed."""
    started = time.perf_counter()
    config, learner, backend = _start(settings)
    with closing(backend):
        yield measured("engine", f"started in {time.perf_counter() - started:.0f} s, with the repeat guard")
        pushes = Pushes.often(backend.pusher, learner.model, CHANGE, backend.engine)
        yield pushes.row("ten pushes, full")
        lora = _load(config)
        tune(lora.model, LORA, lora.vocab.coord_token_ids)
        pusher = ColocatedPusher(LearnerWeights(lora.model), resolved_rollout(config).vllm.sync)
        pusher.engine = backend.engine
        yield Pushes.often(pusher, lora.model, LORA_CHANGE, backend.engine).row("ten pushes, LoRA merged")
        if torch.cuda.is_available():
            sleep, wake = median(pushes.sleep_s), median(pushes.wake_s)
            figure = f"{sleep:.2f} s to sleep, {wake:.2f} s to wake; around each push above"
            yield measured("sleep and wake", figure, sleep_s=sleep, wake_s=wake)
        else:
            yield Row("sleep and wake", "skipped", "vLLM does not sleep on CPUs")

        backend.pusher.push(PUSHES)  # full weights again, in place of LoRA's
        requests = _requests(settings, learner)
        yield _agreement("vLLM = transformers", learner, requests, backend.generate(requests, SEEDS))
        many = (requests * AT_ONCE[True])[: AT_ONCE[torch.cuda.is_available()]]
        started = time.perf_counter()
        tokens = sum(len(rollout.response_token_ids) for rollout in backend.generate(many, SEEDS))
        speed = tokens / (time.perf_counter() - started)
        yield measured("decoding", f"{speed:,.0f} tokens/s, {len(many)} answers at once", tokens_per_s=speed)
        rate = pushes.bytes_per_s
        yield measured("push", f"{rate / 1e9:.2f} GB/s, checksums included", bytes_per_s=rate)


def tensor_parallel(settings: Settings) -> Iterator[Row]:
    """One engine over two processes."""
    _, learner, backend = _start(settings, 2)
    with closing(backend):
        yield Pushes.often(backend.pusher, learner.model, CHANGE, backend.engine).row("TP 2: ten pushes")
        requests = _requests(settings, learner)
        yield _agreement("TP 2: vLLM = transformers", learner, requests, backend.generate(requests, SEEDS))


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
            time.sleep(POLL_S)
        learner = _load(config)
        pusher = ServerPusher([client], LearnerWeights(learner.model), resolved_rollout(config).vllm.sync)
        with closing(pusher):
            yield Pushes.often(pusher, learner.model, CHANGE).row("server: ten pushes")
    server.terminate()
    server.wait(BOOT_S)


@dataclass
class Pushes:
    """Ten pushes, each of changed weights and with checksums, on GPUs each after the engine slept and woke up."""

    num_bytes: int = 0
    push_s: list[float] = field(default_factory=list)
    sleep_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)

    @classmethod
    def often(cls, pusher: WeightPusher, model: Any, change: float, engine: InProcessEngine | None = None) -> Pushes:
        """``engine``: the one that sleeps in between. Raises RolloutError for other weights in an engine."""
        found = cls()
        for version in range(PUSHES):
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(version)  # the same on all ranks
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(change * torch.randn_like(parameter))
            if engine is not None:
                found.sleep_s.append(_seconds(lambda: engine.sleep(1)))
                found.wake_s.append(_seconds(lambda: engine.wake_up(["weights"])))
            report = pusher.push(version)
            if engine is not None:
                found.wake_s[-1] += _seconds(lambda: engine.wake_up(["kv_cache"]))
            if report.checksum is None:
                raise RolloutError(f"push {version} was not compared with the engine's weights")
            found.num_bytes = report.bytes
            found.push_s.append(report.seconds)
        return found

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / median(self.push_s)

    def row(self, check: str) -> Row:
        figure = f"{len(self.push_s)} checksums equal; {self.num_bytes / 1e6:,.0f} MB in {median(self.push_s):.2f} s"
        return measured(check, figure, bytes=self.num_bytes, seconds=median(self.push_s))


def _config(settings: Settings, file: str, **keys: Any) -> RunConfig:
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    if not on_gpu:  # starting takes minutes otherwise
        keys |= {"rollout_matching__vllm__enforce_eager": True, "rollout_matching__vllm__max_num_batched_tokens": 1024}
    return config_of(
        settings, f"stage2_rollout_aligned/{file}", model_of(settings), "scenes",
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


def _start(settings: Settings, tensor_parallel_size: int = 1) -> tuple[RunConfig, LoadedModel, ColocatedBackend]:
    config = _config(settings, "colocate.yaml", rollout_matching__vllm__tensor_parallel_size=tensor_parallel_size)
    join_processes(config)
    learner = _load(config)
    parts = LearnerParts(
        learner.model,
        learner.vocab,
        learner.image_token_id,
        LearnerWeights(learner.model),
        learner.checkpoint.base,
        open_rgb,
    )
    backend = build_backend(resolved_rollout(config), parts)
    assert isinstance(backend, ColocatedBackend)
    backend.sync_weights(0)
    return config, learner, backend


def _requests(settings: Settings, learner: LoadedModel) -> list[RolloutRequest]:
    records = read_jsonl(settings.folder / "scenes" / "scenes.jsonl")
    dataset = RecordDataset(records, PromptEncoder(learner.processor, None, None).encode)
    return [dataset[index].request for index in range(len(dataset))]


@torch.no_grad()
def _agreement(
    check: str, learner: LoadedModel, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]
) -> Row:
    """Whether each token of greedy answers is the one that transformers finds most likely after the same tokens."""
    model, vocab = learner.model, learner.vocab
    device, dtype = next(model.parameters()).device, str(model.dtype).removeprefix("torch.")
    same = far = total = 0
    first = ""
    for request, rollout in zip(requests, rollouts, strict=True):
        answer = [*rollout.response_token_ids, *([] if rollout.truncated else [vocab.eos_id])]
        ids_1L = torch.tensor([[*request.prompt_token_ids, *answer]], device=device)
        logits_TV = model(
            input_ids=ids_1L,
            attention_mask=torch.ones_like(ids_1L),
            mm_token_type_ids=(ids_1L == learner.image_token_id).int(),
            pixel_values=request.model_inputs["pixel_values"].to(device, model.dtype),
            image_grid_thw=request.model_inputs["image_grid_thw"].to(device),
            logits_to_keep=len(answer) + 1,
            use_cache=False,
        ).logits[0, :-1]
        known_TV = logits_TV[:, : len(vocab)].float()  # a padded head has rows without a token
        best_T, token_T = known_TV.max(-1).values, torch.tensor(answer, device=device)
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


def _seconds(act: Any) -> float:
    started = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
