"""A vLLM engine that skips forced tokens gives transformers' answers, repeat guard and allowed labels included, in
fewer steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import resolved_rollout
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.weights import LearnerWeights
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import SeedContext, build_backend, rollout_session
from coordexp.rollouts.learner import LearnerParts
from support.rollout_servers import COLOCATED
from support.tiny_run import run_config

MODEL = Path(__file__).parents[2] / "checkpoints" / "demo-stage1"
PROMPT = "Detect every object."  # the checkpoint's own
GUARD = {"enabled": True, "min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0, "ngram_repeats": 0,
         "max_object_keys": 2}  # fmt: skip
LABELS = ("red circle", "red square", "blue triangle", "green circle")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    loaded = load_model(MODEL, "float32")
    loaded.model.eval()
    return loaded


@pytest.fixture(scope="module")
def requests_(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[RolloutRequest]:
    scenes = write_scenes(tmp_path_factory.mktemp("scenes"), 12, SPECS["sparse"], seed=5)
    encoder = PromptEncoder(loaded.processor, PROMPT, None)
    return [encoder.encode(record) for record in read_jsonl(scenes)]


def answers(
    loaded: LoadedModel, requests: list[RolloutRequest], folder: Path, labels: tuple[str, ...], **keys: Any
) -> tuple[list[Rollout], int]:
    """Greedy answers of a backend, and the engine steps that they took (0 for transformers)."""
    config = run_config(
        folder, 2, model__model=str(MODEL), global_max_length=900, rollout_matching__max_new_tokens=300,
        rollout_matching__decode_batch_size=4, rollout_matching__repeat_terminate=GUARD, **keys,
    )  # fmt: skip
    weights = LearnerWeights(loaded.model)
    parts = LearnerParts(loaded.model, loaded.vocab, loaded.image_token_id, weights, MODEL, open_rgb)
    steps = 0

    def counted(step: Any) -> Any:
        def count() -> Any:
            nonlocal steps
            steps += 1
            return step()

        return count

    with closing(build_backend(resolved_rollout(config), parts, labels)) as backend, rollout_session(backend, 0):
        if keys:
            engine = backend.engine.vllm  # pyright: ignore[reportAttributeAccessIssue]
            engine.step = counted(engine.step)
        return backend.generate(requests, SeedContext(1, 0, 0, 0)), steps


@pytest.mark.parametrize("labels", [(), LABELS], ids=["any label", "allowed labels"])
def test_answers_are_those_of_transformers(
    labels: tuple[str, ...], loaded: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    plain, _ = answers(loaded, requests_, tmp_path / "hf", labels)
    keys: dict[str, Any] = {**COLOCATED, "rollout_matching__decoding__skip_forced_tokens": True}
    skipping, steps = answers(loaded, requests_, tmp_path / "vllm", labels, **keys)
    assert [one.response_token_ids for one in skipping] == [one.response_token_ids for one in plain]
    assert [one.repeat_terminated for one in skipping] == [one.repeat_terminated for one in plain]
    assert {one.repeat_terminated for one in plain} == {False, True}
    # Three batches of four: without drafts, as many steps as the longest answer of each has tokens.
    longest = sum(max(len(one.response_token_ids) for one in plain[k : k + 4]) for k in range(0, 12, 4))
    assert steps < 0.7 * longest
