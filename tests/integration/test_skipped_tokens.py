"""A vLLM engine that skips forced tokens gives the answers of transformers' ``generate``, repeat guard and allowed
class names included, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from coordexp.config import resolved_rollout
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.parsing import parse_rollout
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import SeedContext, build_backend, rollout_session
from coordexp.rollouts.backend import TrainerParts
from support.rollout_servers import COLOCATED
from support.tiny_run import run_config

MODEL = Path(__file__).parents[2] / "checkpoints" / "demo-stage1"
PROMPT = "Detect every object."  # the checkpoint's own
GUARD = {"enabled": True, "min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0, "ngram_repeats": 0,
         "max_object_keys": 2}  # fmt: skip
CACHE_BLOCK = 32  # tokens
EVERY_TOKEN = {"rollout_matching__decoding": {"skip_forced_tokens": False}}
CLASS_NAMES = ("red circle", "red square", "blue triangle", "green circle")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    loaded = load_model(MODEL, "float32")
    loaded.model.eval()
    return loaded


@pytest.fixture(scope="module")
def requests_(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[RolloutRequest]:
    return requests_of(loaded, write_scenes(tmp_path_factory.mktemp("scenes"), 12, SPECS["sparse"], seed=5))


def requests_of(loaded: LoadedModel, scenes: Path, prompt: str = PROMPT) -> list[RolloutRequest]:
    encoder = PromptEncoder(loaded.processor, prompt, None)
    return [encoder.encode(record) for record in read_jsonl(scenes)]


class Counted(NamedTuple):
    """Answers of a backend, and of its engine: steps, and how often it took the cache of an unfinished answer away."""

    rollouts: list[Rollout]
    steps: int = 0
    preemptions: int = 0


def answers(
    loaded: LoadedModel,
    requests: list[RolloutRequest],
    folder: Path,
    class_names: tuple[str, ...],
    engine_arguments: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Counted:
    """Answers of a backend. ``engine_arguments``: further ones of a vLLM engine."""
    config = run_config(
        folder, 2, model__model=str(MODEL), global_max_length=900,
        **{
            "rollout_matching__max_new_tokens": 300, "rollout_matching__decode_batch_size": 4,
            "rollout_matching__repeat_terminate": GUARD, **keys,
        },
    )  # fmt: skip
    weights = TrainerWeights(loaded.model)
    parts = TrainerParts(loaded.model, loaded.vocab, loaded.image_token_id, weights, MODEL, open_rgb)
    seeds = SeedContext(1, 0, 0, 0)
    with closing(build_backend(resolved_rollout(config), parts, class_names)) as backend:
        if not isinstance(backend, ColocatedBackend):
            with rollout_session(backend, 0):
                return Counted(backend.generate(requests, seeds))
        backend.engine_arguments.update(engine_arguments or {})
        with rollout_session(backend, 0):
            engine = backend.engine.vllm
            waiting, step, steps, preemptions = engine.engine_core.engine_core.scheduler.requests, engine.step, 0, {}

            def counted() -> Any:
                nonlocal steps
                steps += 1
                outputs = step()
                preemptions.update({name: one.num_preemptions for name, one in waiting.items()})
                return outputs

            engine.step = counted
            return Counted(backend.generate(requests, seeds), steps, sum(preemptions.values()))


@pytest.mark.parametrize(
    ("class_names", "penalty"), [((), 1.0), (CLASS_NAMES, 1.1)], ids=["any name", "class names, repetition penalty"]
)
def test_answers_are_those_of_transformers(
    class_names: tuple[str, ...], penalty: float, loaded: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"rollout_matching__repetition_penalty": penalty}
    plain = answers(loaded, requests_, tmp_path / "hf", class_names, **EVERY_TOKEN, **keys).rollouts
    skipping, steps, _ = answers(loaded, requests_, tmp_path / "vllm", class_names, **COLOCATED, **keys)
    assert [one.response_token_ids for one in skipping] == [one.response_token_ids for one in plain]
    assert [one.repeat_terminated for one in skipping] == [one.repeat_terminated for one in plain]
    assert {one.repeat_terminated for one in plain} == {False, True}
    # Three batches of four: without drafts, as many steps as the longest answer of each has tokens.
    longest = sum(max(len(one.response_token_ids) for one in plain[k : k + 4]) for k in range(0, 12, 4))
    assert steps < 0.7 * longest


def test_answers_with_a_full_cache_are_the_same(
    loaded: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    """vLLM takes the cache of an answer away when it is full, and computes that answer's tokens again later."""
    keys: dict[str, Any] = {**COLOCATED, "rollout_matching__decode_batch_size": 12}
    keys["rollout_matching__repeat_terminate"] = {**GUARD, "max_object_keys": 5}
    crowded = requests_of(loaded, write_scenes(tmp_path, 12, SPECS["crowd"], seed=5))
    ample = answers(loaded, crowded, tmp_path / "ample", CLASS_NAMES, **keys)
    tight = answers(loaded, crowded, tmp_path / "tight", CLASS_NAMES, {"num_gpu_blocks_override": 9}, **keys)
    assert ample.preemptions == 0 and tight.preemptions > 0
    assert [one.response_token_ids for one in tight.rollouts] == [one.response_token_ids for one in ample.rollouts]
    assert [one.repeat_terminated for one in tight.rollouts] == [one.repeat_terminated for one in ample.rollouts]
    assert any(one.repeat_terminated for one in ample.rollouts)


def drawn(rollouts: Sequence[Rollout], loaded: LoadedModel) -> list[tuple[object, ...]]:
    """The first decisions of each answer: both names (None without a second object), and coarsely where they begin."""
    found = []
    for rollout in rollouts:
        objects = parse_rollout(rollout.response_token_ids, loaded.vocab, ended=not rollout.truncated).objects
        names = [one.desc for one in objects[:2]]
        corners = [bin_ // 250 for one in objects[:2] for bin_ in one.bins[:2]]
        found.append((*names, *[None] * (2 - len(names)), *corners, *[None] * (4 - len(corners))))
    return found


def same_distribution(first: Sequence[tuple[object, ...]], second: Sequence[tuple[object, ...]]) -> list[float]:
    """p of a chi-square test for each position; values seen less than 20 times count as one."""
    values = []
    for mine, theirs in zip(zip(*first, strict=True), zip(*second, strict=True), strict=True):
        counts = Counter(mine), Counter(theirs)
        common = [value for value, count in (counts[0] + counts[1]).items() if count >= 20]
        table = np.array([[*(one[value] for value in common), 0] for one in counts])
        table[:, -1] = [len(mine) - table[0].sum(), len(theirs) - table[1].sum()]
        table = table[:, table.sum(axis=0) > 0]
        if table.shape[1] > 1:
            result: Any = chi2_contingency(table)
            values.append(float(result.pvalue))
    return values


def test_samples_follow_the_same_distribution(loaded: LoadedModel, tmp_path: Path) -> None:
    """Of many answers to one image. Another temperature shows that the test would notice a difference."""
    scenes = write_scenes(tmp_path, 1, SPECS["sparse"], seed=5)
    # The cache has all of the prompt but its last token, and vLLM pads the first step with drafts of id -1.
    (request,) = requests_of(loaded, scenes, "\n" * 19 + PROMPT)
    assert len(request.prompt_token_ids) % CACHE_BLOCK == 1

    def sampled(name: str, temperature: float, skip: bool, count: int = 96) -> list[Rollout]:
        keys: dict[str, Any] = {
            **COLOCATED,
            # vLLM on CPUs cannot rewind a seeded generator, so all prompts of a batch must fit into one step.
            "rollout_matching__decode_batch_size": 16,
            "rollout_matching__max_new_tokens": 40,
            "rollout_matching__repeat_terminate": {"enabled": False},
            "rollout_matching__decoding": {"temperature": temperature, "skip_forced_tokens": skip},
        }
        return answers(loaded, [request] * count, tmp_path / name, (), {"block_size": CACHE_BLOCK}, **keys).rollouts

    plain = sampled("plain", 1.5, False)
    skipping = sampled("skipping", 1.5, True)
    tokens = [one.response_token_ids for one in skipping]
    assert tokens != [one.response_token_ids for one in plain]
    assert tokens[:16] == [one.response_token_ids for one in sampled("again", 1.5, True, 16)]
    warmer = sampled("warmer", 2.0, True)
    first, second, third = (drawn(rollouts, loaded) for rollouts in (plain, skipping, warmer))
    assert min(same_distribution(first, second)) > 1e-3
    assert min(same_distribution(first, third)) < 1e-6
