"""A language head with more rows than the tokenizer has tokens: no server answers with an id that nothing can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from coordexp.errors import ServerRefused
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend
from support.rollout_servers import (
    NEW_TOKENS,
    RunningServer,
    greedy_tokens,
    load_served,
    payload,
    served_tokens,
    server_config,
    serving,
)
from support.settings import decoding
from support.swift_servers import swift_rollout
from support.tiny_run import tiny_samples

PADDING = 9


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served checkpoint with rows behind its last token, which score above whatever it would have written."""
    folder = tmp_path_factory.mktemp("padded")
    served = load_served()
    model, known = served.model, len(served.vocab)
    written = greedy_tokens(served, requests_of(served)[:1])[0][0]
    model.resize_token_embeddings(known + PADDING, mean_resizing=False)
    with torch.no_grad():
        head: Any = model.get_output_embeddings()
        rows = head.weight
        rows[known:] = 1.5 * rows[written]
    model.save_pretrained(folder)
    served.processor.save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == known
    return folder


@pytest.fixture(scope="module")
def loaded(padded: Path) -> LoadedModel:
    return load_model(padded, "float32")


def requests_of(loaded: LoadedModel) -> list[RolloutRequest]:
    """Images that ms-swift leaves at their size: it enlarges those under 4,096 pixels."""
    return [sample.request for sample in tiny_samples(loaded, 8) if sample.record.width >= 64]


@pytest.fixture(scope="module", params=["coordexp serve", "swift rollout"])
def server(
    request: pytest.FixtureRequest, padded: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    own = request.param == "coordexp serve"
    config = server_config(
        folder, checkpoint=padded, launch={"server": "coordexp" if own else "swift", "wait_s": 240.0}
    )
    with (serving if own else swift_rollout)(folder, config) as running:
        yield running


def test_servers_answer_what_transformers_answers_with_these_ids_suppressed(
    server: RunningServer, loaded: LoadedModel
) -> None:
    requests = requests_of(loaded)
    known = len(loaded.vocab)
    free = greedy_tokens(loaded, requests)
    assert any(token >= known for answer in free for token in answer), "nothing here needs suppressing"
    backend = HFBackend(loaded.model, loaded.vocab, decoding(NEW_TOKENS), len(requests), loaded.image_token_id)
    expected = [list(one.response_token_ids) for one in backend.generate(requests, SeedContext(0, 0, 0, 0))]
    client = server.client()
    found = served_tokens(client, requests)
    assert [answer[:-1] if answer[-1] == loaded.vocab.eos_id else answer for answer in found] == expected
    items = client.infer(payload(requests, temperature=2.0))
    sampled = {token for item in items for token in item["response"]["choices"][0]["token_ids"]}
    assert max(sampled) < known
    status = client.status()
    client.close()
    assert status is not None and {one["num_known_tokens"] for one in status["workers"]} == {known}


def test_what_vllm_finds_wrong_with_a_request_reaches_the_learner(server: RunningServer, loaded: LoadedModel) -> None:
    """As a refusal by our server: a learner tries status 500 again."""
    client = server.client()
    status = client.status()
    with pytest.raises(ServerRefused, match="temperature") as refused:
        client.infer(payload(requests_of(loaded)[:1], temperature=9.0))
    assert status is not None
    assert refused.value.status == {"coordexp serve": 400, "swift rollout": 500}[status["server"]]
    client.close()
