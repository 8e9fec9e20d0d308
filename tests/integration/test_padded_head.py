"""A language head with more rows than the tokenizer has tokens: no server answers with an id beyond the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from coordexp.errors import ServerRefused
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend
from support.rollout_servers import (
    NEW_TOKENS,
    RunningServer,
    greedy_tokens,
    load_served,
    payload,
    requests_of,
    served_tokens,
    server_config,
    serving,
    swift_rollout,
)
from support.settings import decoding

PADDING = 9


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served checkpoint with rows after its last token, which score higher than any other."""
    folder = tmp_path_factory.mktemp("padded")
    served = load_served()
    model, known = served.model, len(served.vocab)
    written = greedy_tokens(served, requests_of(served, 1))[0][0]
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


def test_ids_beyond_the_tokenizer_are_suppressed(server: RunningServer, loaded: LoadedModel) -> None:
    requests = requests_of(loaded, 12)
    known = len(loaded.vocab)
    free = greedy_tokens(loaded, requests)
    assert any(token >= known for answer in free for token in answer), "nothing to suppress"
    backend = HFBackend(loaded.model, loaded.vocab, decoding(NEW_TOKENS), len(requests), loaded.image_token_id)
    expected = [list(one.response_token_ids) for one in backend.generate(requests, SeedContext(0, 0, 0, 0))]
    client = server.client()
    found = served_tokens(client, requests)
    assert [answer[:-1] if answer[-1] == loaded.vocab.eos_id else answer for answer in found] == expected
    items = client.infer(payload(requests, temperature=2.0))
    sampled = {token for item in items for token in item["response"]["choices"][0]["token_ids"]}
    assert max(sampled) < known
    client.close()
    assert {one["num_known_tokens"] for one in server.status()["workers"]} == {known}


def test_a_refusal_has_vllms_reason(server: RunningServer, loaded: LoadedModel) -> None:
    """Our server refuses it; with status 500 the trainer would retry."""
    client = server.client()
    status = client.status()
    with pytest.raises(ServerRefused, match="temperature") as refused:
        client.infer(payload(requests_of(loaded, 1), temperature=9.0))
    assert status is not None
    assert refused.value.status == {"coordexp serve": 400, "swift rollout": 500}[status["server"]]
    client.close()
