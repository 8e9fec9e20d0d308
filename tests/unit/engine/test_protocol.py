"""Requests to a server and its valid answers."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.coords import TURN_END, CoordVocab
from coordexp.engine.wire.protocol import infer_payload, read_answer
from coordexp.errors import RolloutError
from coordexp.modeling.inputs import build_messages
from coordexp.records import RolloutRequest
from coordexp.weight_sync import WeightVersion
from support.qwen_tokenizer import qwen_vocab
from support.settings import decoding

OPTIONS = decoding(9, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.1)


@pytest.fixture
def request_(tmp_path: Path) -> RolloutRequest:
    path = tmp_path / "a b.png"
    Image.new("RGB", (3, 2), (200, 10, 30)).save(path)
    return RolloutRequest("s1", path, build_messages(path, "Detect ü.", "Be exact."), (5, 6, 7))


def test_the_body_is_json_in_ms_swifts_format(request_: RolloutRequest) -> None:
    body = json.loads(json.dumps(infer_payload([request_, request_], 17, OPTIONS, str)))
    assert body["infer_requests"][0] == {
        "messages": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "<image>Detect ü."}],
        "images": [str(request_.image)],
    }
    assert body["request_config"] == {
        "n": 1, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "seed": 17,
        "return_details": True,
    }  # fmt: skip


def test_a_prompt_that_servers_tokenise_differently_is_refused(tmp_path: Path) -> None:
    request = RolloutRequest("s", tmp_path / "x.png", build_messages(tmp_path / "x.png", "An <image> here", None), (1,))
    with pytest.raises(RolloutError, match=r"reword template\.prompt"):
        infer_payload([request], 1, OPTIONS, str)


def item(ids: list[int], finish: str = "stop", **envelope: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": finish, "token_ids": ids}
    response = {"choices": [choice], "prompt_token_ids": [5, 6, 7]}
    return {"response": response, **({"coordexp": envelope} if envelope else {})}


def read(body: Any, version: int = 4, guarded: bool = False) -> Any:
    request = RolloutRequest("s1", Path("x.png"), (), (5, 6, 7))
    return read_answer(body, request, qwen_vocab(), WeightVersion(version, "this"), guarded, "http://h:1/infer/")


def test_an_answer_is_trimmed_at_the_stop_token() -> None:
    vocab: CoordVocab = qwen_vocab()
    ids = list(vocab.encode('{"object_1": {}}'))
    rollout = read(item([*ids, vocab.eos_id]))
    assert rollout.response_token_ids == tuple(ids) and rollout.text == '{"object_1": {}}'
    assert (rollout.prompt_token_ids, rollout.weight_version) == ((5, 6, 7), 4)
    assert not rollout.truncated and not rollout.repeat_terminated
    assert read(item([*vocab.encode(TURN_END)])).response_token_ids == ()


@pytest.mark.parametrize(
    ("ids", "finish", "truncated"),
    [([9, 8], "length", True), ([9, 8], "stop", False)],  # a server may omit the end token
)
def test_truncation_is_taken_from_the_finish_reason(ids: list[int], finish: str, truncated: bool) -> None:
    rollout = read(item(ids, finish))
    assert rollout.response_token_ids == tuple(ids) and rollout.truncated is truncated


def test_an_unwrapped_response_is_accepted() -> None:
    assert read(item([9], "length")["response"]).response_token_ids == (9,)


@pytest.mark.parametrize("private", [{}, {"weight_version": 4, "trainer_id": "this", "repeat_terminate_active": 1}])
@pytest.mark.parametrize("triggered", [0, 1])
def test_a_guarded_answer_has_the_trigger_flag(private: dict[str, Any], triggered: int) -> None:
    """The contract's one key is required; the keys that our server adds are optional."""
    body = item([9], "stop", repeat_terminate_triggered=triggered, **private)
    assert read(body, guarded=True).repeat_terminated is bool(triggered)


@pytest.mark.parametrize("flag", ["0", "1", 7, -1, True, False, None, 1.0, [1]])
def test_a_flag_is_the_number_0_or_1(flag: Any) -> None:
    for name, guarded in itertools.product(("repeat_terminate_triggered", "repeat_terminate_active"), (True, False)):
        body = item([9], "stop", **{"repeat_terminate_triggered": 0, name: flag})
        with pytest.raises(RolloutError, match=rf"coordexp\.{name} holds .* and must be the number 0 or 1"):
            read(body, guarded=guarded)


def broken(**changes: Any) -> dict[str, Any]:
    body = item([9])
    for name, value in changes.items():
        target = body["response"] if name == "prompt_token_ids" else body["response"]["choices"][0]
        if value is None:
            target.pop(name)
        else:
            target[name] = value
    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (broken(token_ids=None), "return_details"),
        (broken(token_ids="9"), "return_details"),
        (broken(token_ids=[9, 1.5]), "return_details"),
        (broken(token_ids=[-1]), "return_details"),
        (broken(token_ids=[True]), "return_details"),
        (broken(prompt_token_ids=None), "return_details"),
        (broken(prompt_token_ids=[]), "the prompt had no tokens"),
        (broken(finish_reason=None), "return_details"),
        (broken(finish_reason="abort"), "ended with 'abort'"),
        ({"response": {"choices": [], "prompt_token_ids": [1]}}, "return_details"),
        ({"response": "no"}, "return_details"),
        (item([9, len(qwen_vocab())]), f"token id {len(qwen_vocab())}"),  # a padded head's
        (item([9], weight_version=3), "weights of version 3 of trainer this, not version 4"),
        (item([9], weight_version=4, trainer_id="other"), "version 4 of trainer other, not version 4 of trainer this"),
        (item([9], weight_version=4, trainer_id=None), "version 4 of no named trainer, not"),
        (item([9], weight_version=4, repeat_terminate_active=1), "guard is active"),
        (item([9]) | {"coordexp": [1]}, "not an object"),
    ],
)
def test_invalid_answers_are_refused_with_their_place(body: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as error:
        read(body)
    assert "http://h:1/infer/, s1" in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        item([9]),
        item([9], weight_version=4),
        item([9], repeat_terminate_active=1),
        item([9], repeat_terminate_active=0, repeat_terminate_triggered=0),
    ],
)
def test_an_unguarded_answer_is_refused_if_the_guard_is_on(body: Any) -> None:
    with pytest.raises(RolloutError, match="guard is not active"):
        read(body, guarded=True)


def test_ms_swift_accepts_our_requests() -> None:
    """Its own classes read it: messages, images as strings, and how to decode."""
    swift: Any = pytest.importorskip("swift.infer_engine.protocol")
    request = RolloutRequest(
        "s", Path("/images/a b.png"), build_messages(Path("/images/a b.png"), "Detect ü.", "S"), (1,)
    )
    options = decoding(9, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.1)
    body = infer_payload([request], 17, options, str)
    (one,) = body["infer_requests"]
    assert set(one) <= {field.name for field in fields(swift.RolloutInferRequest)}
    read = swift.RolloutInferRequest(**one)
    assert read.images == ["/images/a b.png"] and [m["role"] for m in read.messages] == ["system", "user"]
    config = swift.RequestConfig(**body["request_config"])
    assert (config.seed, config.max_tokens, config.temperature, config.top_p, config.top_k) == (17, 9, 0.5, 0.9, 7)
    assert (config.repetition_penalty, config.n, config.return_details) == (1.1, 1, True)
