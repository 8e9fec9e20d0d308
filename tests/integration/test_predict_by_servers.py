"""``coordexp predict`` by real servers, whose model has more rows than the tokenizer has tokens, and whose answers may
be limited to class names: the answers and scores of transformers, and no id beyond the tokenizer.

The demo's model answers, because its answers hold objects to score, in float32, in which all engines choose the same
tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from coordexp.data.dataset import RecordDataset
from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl
from coordexp.errors import ServerRefused
from coordexp.evaluation.answers import read_answers
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend
from support.cli_runs import run_cli
from support.forked import Handle, coordexp, forked
from support.predicted import IMAGES, KEYS, Own, answered_by_transformers, assert_same
from support.rollout_servers import (
    NEW_TOKENS,
    RunningServer,
    greedy_tokens,
    payload,
    requests_of,
    served_tokens,
    server_config,
    server_keys,
    serving,
    swift_rollout,
)
from support.settings import decoding
from support.tiny_run import encoder_of

NAMES = ["red circle", "yellow triangle", "blue square"]
PADDING = 9
DEADLINE_S = 900.0


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint with rows after its last token, which score higher than any other."""
    folder = tmp_path_factory.mktemp("padded")
    demo = load_model(asset("checkpoints/demo-stage1"), "float32")
    model, known = demo.model, len(demo.vocab)
    written = greedy_tokens(demo, requests_of(demo, 1))[0][0]
    model.resize_token_embeddings(known + PADDING, mean_resizing=False)
    with torch.no_grad():
        head: Any = model.get_output_embeddings()
        rows = head.weight
        rows[known:] = 1.5 * rows[written]
    model.save_pretrained(folder)
    demo.processor.save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == known
    return folder


@pytest.fixture(scope="module")
def loaded(padded: Path) -> LoadedModel:
    return load_model(padded, "float32")


@pytest.fixture(scope="module")
def own(padded: Path, tmp_path_factory: pytest.TempPathFactory) -> Own:
    return answered_by_transformers(padded, tmp_path_factory.mktemp("predict"))


class Served(NamedTuple):
    config: dict[str, Any]
    running: RunningServer


@contextmanager
def served_by(program: str, padded: Path, folder: Path) -> Iterator[Served]:
    closed: dict[str, Any] = {"rollout_matching__vllm__server__closed_names": True}
    config = server_config(folder, 1, padded, launch={"server": program, "wait_s": 240.0}, **KEYS | closed)
    own = program == "coordexp"
    with serving(folder, config, by_shell=True) if own else swift_rollout(folder, config) as running:
        yield Served(config, running)


@pytest.fixture(scope="module")
def by_coordexp(padded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by("coordexp", padded, tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(scope="module")
def by_swift(padded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by("swift", padded, tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(params=["coordexp", "swift"])
def server(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(f"by_{request.param}")


@pytest.fixture(scope="module")
def requests_(own: Own, loaded: LoadedModel) -> list[RolloutRequest]:
    dataset = RecordDataset(read_jsonl(own.data), encoder_of(loaded).encode)
    return [dataset[index].request for index in range(IMAGES)]


def test_ids_beyond_the_tokenizer_are_suppressed(
    server: Served, loaded: LoadedModel, requests_: list[RolloutRequest]
) -> None:
    known = len(loaded.vocab)
    free = greedy_tokens(loaded, requests_)
    assert any(token >= known for answer in free for token in answer), "nothing to suppress"
    backend = HFBackend(loaded.model, loaded.vocab, decoding(NEW_TOKENS), len(requests_), loaded.image_token_id)
    expected = [list(one.response_token_ids) for one in backend.generate(requests_, SeedContext(0, 0, 0, 0))]
    client = server.running.client()
    found = served_tokens(client, requests_)
    assert [answer[:-1] if answer[-1] == loaded.vocab.eos_id else answer for answer in found] == expected
    items = client.infer(payload(requests_, temperature=2.0))
    sampled = {token for item in items for token in item["response"]["choices"][0]["token_ids"]}
    assert max(sampled) < known
    client.close()
    assert {one["num_known_tokens"] for one in server.running.status()["workers"]} == {known}


def test_a_refusal_has_vllms_reason(server: Served, requests_: list[RolloutRequest]) -> None:
    """Our server refuses it; with status 500 the trainer would retry."""
    client = server.running.client()
    status = client.status()
    with pytest.raises(ServerRefused, match="temperature") as refused:
        client.infer(payload(requests_[:1], temperature=9.0))
    assert status is not None
    assert refused.value.status == {"coordexp serve": 400, "swift rollout": 500}[status["server"]]
    client.close()


def test_answers_are_those_of_transformers_with_class_names_and_without(
    own: Own, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--classes", ",".join(NAMES), "--limit", 4, "--out")
    assert run_cli(capsys, "predict", own.run(), own.data, *asked, tmp_path / "hf").code == 0
    run = own.run(**server_keys(server.config))
    done = run_cli(capsys, "predict", run, own.data, *asked, tmp_path / "listed")
    assert done.code == 0, done.err
    assert run_cli(capsys, "predict", run, own.data, "--out", tmp_path / "free").code == 0
    assert_same(read_answers(tmp_path / "listed"), read_answers(tmp_path / "hf"))
    said = {obj.desc for answer in read_answers(tmp_path / "listed") for obj in answer.pred}
    assert said and said <= set(NAMES)
    assert_same(read_answers(tmp_path / "free"), own.answers)


def test_predict_resumes_after_a_kill(
    own: Own, by_coordexp: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own.run(**server_keys(by_coordexp.config))
    out = tmp_path / "jsonl"
    done = killed_after(2, ["predict", str(run), str(own.data), "--out", str(out)], out / "predictions.jsonl")
    again = run_cli(capsys, "predict", run, own.data, "--out", out, "--json")
    assert again.code == 0, again.err
    assert 2 <= done <= json.loads(again.out)["resumed"] < IMAGES
    assert_same(read_answers(out), own.answers)
    assert [a.sample_id for a in read_answers(out)] == [a.sample_id for a in own.answers]
    photos = run_cli(capsys, "predict", run, own.folder / "images", "--out", tmp_path / "folder", "--json")
    assert json.loads(photos.out)["images"] == IMAGES
    found = read_answers(tmp_path / "folder")
    assert_same(found, own.answers)
    assert all(answer.gt is None for answer in found)


def killed_after(lines: int, argv: Sequence[str], file: Path) -> int:
    """Start the command and kill it as soon as ``file`` holds ``lines`` lines; returns how many it held then."""
    log = file.parent.with_suffix(".log")
    process = Handle(forked(coordexp, list(argv), log=log))
    deadline = time.monotonic() + DEADLINE_S
    try:
        while (held := count_lines(file)) < lines:
            assert process.poll() is None, f"it ended by itself: {log.read_text()}"
            assert time.monotonic() < deadline, "no answers"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    return held


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
