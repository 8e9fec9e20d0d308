"""``coordexp predict`` with real vLLM engines: the answers and scores of ``rollout_backend: hf``.

The demo's model answers, because its answers hold objects to score. All runs are greedy and in float32, in which both
engines choose the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp import Detector
from coordexp.data.files import asset
from coordexp.evaluation.answers import read_answers
from support.cli_runs import run_cli
from support.predicted import IMAGES, KEYS, Own, answered_by_transformers, assert_same
from support.rollout_servers import COLOCATED

DEMO = asset("checkpoints/demo-stage1")
NAMES = ["red circle", "yellow triangle", "blue square"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Own:
    return answered_by_transformers(DEMO, tmp_path_factory.mktemp("predict"))


def test_predict_with_a_colocated_engine(own: Own, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = own.run(**COLOCATED)
    out = tmp_path / "jsonl"
    first = run_cli(capsys, "predict", run, own.data, "--out", out, "--limit", 3, "--json")
    assert json.loads(first.out)["resumed"] == 0
    blocks = "rollout_matching.vllm.engine_args={block_size: 32, enable_chunked_prefill: true}"  # change no answer
    whole = run_cli(capsys, "predict", run, own.data, "--out", out, "--json", blocks)
    assert (json.loads(whole.out)["images"], json.loads(whole.out)["resumed"]) == (IMAGES, 3)
    assert_same(read_answers(out), own.answers)
    assert [a.sample_id for a in read_answers(out)] == [a.sample_id for a in own.answers]
    assert all(answer.gt is not None for answer in read_answers(out))


def test_detector_with_a_colocated_engine(own: Own) -> None:
    """From Python, with the defaults of every key: one process, one engine; files, folders and pixels."""
    with Detector(
        DEMO, backend="vllm", prompt=KEYS["template__prompt"], max_new_tokens=128, batch_size=3, dtype="float32"
    ) as detector:
        found = detector.predict(own.folder / "images")
        (first,) = [one for one in own.answers if Path(one.image).name == Path(found[0].source).name]
        pixels = detector.predict(Image.open(first.image))
    assert_same([one.answer for one in found if one.answer is not None], own.answers)
    assert (pixels.text, pixels.names) == (first.text, [obj.desc for obj in first.pred])
    assert pixels.boxes.tolist() == found[0].boxes.tolist()


def test_several_answers_of_an_engine(own: Own) -> None:
    """The first is the greedy one; the others are sampled, and the same whatever is answered next to them."""
    images = sorted((own.folder / "images").rglob("*.png"))[:4]
    text_of = {Path(answer.image).name: answer.text for answer in own.answers}
    with Detector(
        DEMO, backend="vllm", prompt=KEYS["template__prompt"], max_new_tokens=128, batch_size=6, dtype="float32",
        answers=3, temperature=1.0,
    ) as detector:  # fmt: skip
        found = detector.predict(images)
        again = detector.predict(images[:1])
    texts = [(one.text, *one.answer.further_texts) for one in found]
    assert [answers[0] for answers in texts] == [text_of[path.name] for path in images]
    assert all(len(answers) == 3 for answers in texts) and any(len(set(answers)) == 3 for answers in texts)
    assert again[0].answer.further_texts == found[0].answer.further_texts
    assert all(obj.answers in (1, 2, 3) for one in found for obj in one)


def test_class_names_in_both_engines(own: Own) -> None:
    given: dict[str, Any] = {"prompt": KEYS["template__prompt"], "max_new_tokens": 128, "classes": NAMES}
    images = sorted((own.folder / "images").rglob("*.png"))[:4]
    found = {}
    for backend in ("hf", "vllm"):
        with Detector(DEMO, backend=backend, batch_size=2, dtype="float32", **given) as detector:
            found[backend] = detector.predict(images)
    assert [one.text for one in found["vllm"]] == [one.text for one in found["hf"]]
    said = {name for one in found["vllm"] for name in one.names}
    free = {obj.desc for one in own.answers[:4] for obj in one.pred}
    assert said and said <= set(NAMES) and not free <= set(NAMES)
