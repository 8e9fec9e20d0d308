"""transformers' answers with forced tokens skipped are those of its ``generate``, in fewer forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend
from support.settings import decoding

MODEL = Path(__file__).parents[2] / "checkpoints" / "demo-stage1"
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=0, max_consecutive_token_repeats=0, ngram_size=0, ngram_repeats=0, max_object_keys=4
)
CLASS_NAMES = ("red circle", "red square", "blue triangle", "green circle")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    loaded = load_model(MODEL, "float32")
    loaded.model.eval()
    return loaded


@pytest.fixture(scope="module")
def requests_(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[RolloutRequest]:
    """Four answers of a few objects. Then a batch with long and short ones: its short ones leave the cache earlier."""
    encoder, folder = PromptEncoder(loaded.processor, "Detect every object.", None), tmp_path_factory.mktemp("scenes")
    sets = {"moderate": 6, "crowd": 2}
    written = [write_scenes(folder / name, count, SPECS[name], seed=5) for name, count in sets.items()]
    return [encoder.encode(record) for scenes in written for record in read_jsonl(scenes)]


@pytest.mark.parametrize(
    ("class_names", "options"),
    [((), {}), ((), {"temperature": 1.0}), (CLASS_NAMES, {"repetition_penalty": 1.1})],
    ids=["greedy", "sampled", "class names, repetition penalty"],
)
def test_answers_are_those_of_generate(
    class_names: tuple[str, ...],
    options: dict[str, Any],
    loaded: LoadedModel,
    requests_: list[RolloutRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples of a seed are the same too."""
    passes = 0
    forward = loaded.model.model.language_model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(loaded.model.model.language_model, "forward", counted)
    found, counts = [], []
    for skip in (False, True):
        asked = decoding(max_new_tokens=200, **options)
        backend = HFBackend(loaded.model, loaded.vocab, asked, 4, loaded.image_token_id, GUARD, class_names, skip)
        rollouts = backend.generate(requests_, SeedContext(10, 0, 0, 0))  # a seed with a long sample
        found.append([(one.response_token_ids, one.repeat_terminated, one.truncated) for one in rollouts])
        counts.append(passes - sum(counts))
    assert found[1] == found[0]
    if not class_names:
        assert {ended for _, ended, _ in found[0]} == {False, True}
    assert max(len(tokens) for tokens, _, _ in found[0]) > 150  # the cache grew
    assert counts[1] < 0.9 * counts[0]
