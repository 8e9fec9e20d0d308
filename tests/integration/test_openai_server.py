"""An exported checkpoint in vLLM's own OpenAI server, which imports nothing of CoordExp: the answer to a request holds
the objects that a Detector finds."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from coordexp import Detector
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.inference.parse_answer import parse_answer
from support.cli_runs import run_cli
from support.ports import free_ports
from support.rollout_servers import RunningServer, end, serving_environment, tail

BOOT_S, ANSWER_S = 240.0, 60.0
MAX_TOKENS = 256
PRINTED = "the text of a request, after its image: "


@contextmanager
def vllm_serve(model: Path, log: Path) -> Iterator[str]:
    """The address of ``vllm serve MODEL``, healthy; ended with everything that it started."""
    (port,) = free_ports(1)
    # The command's own module: vLLM's build for CPUs has no command.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "2", "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
    environment = serving_environment(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS=""
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = RunningServer(process, f"http://127.0.0.1:{port}", 0, log)
    deadline = time.monotonic() + BOOT_S
    try:
        while not is_healthy(server.base_url):
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{tail(log)}"
            assert time.monotonic() < deadline, f"no healthy server:\n{tail(log)}"
            time.sleep(0.3)
        yield server.base_url
    finally:
        end(server)


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def ask(address: str, model: Path, image: Path, prompt: str) -> str:
    """The request of docs/serve-a-model.md."""
    url = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": prompt}]
    body = {
        "model": str(model),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_answers_of_an_exported_checkpoint_in_vllm_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained, served = asset("checkpoints/demo-stage1"), tmp_path / "served"
    done = run_cli(capsys, "model", "export", trained, served, "--for", "openai", "--dtype", "float32")
    (prompt,) = [line.removeprefix(PRINTED) for line in done.out.splitlines() if line.startswith(PRINTED)]
    write_scenes(tmp_path, 3, SPARSE, 77)
    images = sorted((tmp_path / "images").rglob("*.png"))
    large = tmp_path / "large.png"  # the server has to resize it as training did
    Image.open(images[0]).resize((300, 220), Image.Resampling.BICUBIC).save(large)
    images.append(large)
    with Detector(trained, max_new_tokens=MAX_TOKENS, dtype="float32", scores=False) as detector:
        expected = detector.predict(images)
    assert sum(len(one) for one in expected) > len(images), "answers without objects would show nothing"
    with vllm_serve(served, tmp_path / "server.log") as address:
        texts = [ask(address, served, image, prompt) for image in images]
    for image, text, one in zip(images, texts, expected, strict=True):
        found = parse_answer(text, Image.open(image), checkpoint=served)
        assert found.objects == one.objects and found.problem == one.problem, image.name
