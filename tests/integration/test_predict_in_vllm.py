"""``coordexp predict`` with real vLLM engines: the answers and scores of ``rollout_backend: hf``.

The demo's model answers, because its answers hold objects to score. All runs are greedy and in float32, in which both
engines choose the same tokens.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from coordexp import Detector
from coordexp.cli import main
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import ImageAnswer, read_answers
from support.cli_runs import run_cli, write_run
from support.forked import Handle, coordexp, forked
from support.rollout_servers import COLOCATED, server_config, server_keys, serving, swift_rollout

DEMO = asset("checkpoints/demo-stage1")
IMAGES = 8
NAMES = ["red circle", "yellow triangle", "blue square"]
DEADLINE_S = 900.0
SCORED_ALIKE = 1e-4
KEYS: dict[str, Any] = {
    "template__prompt": "Detect every object.",
    "global_max_length": 512,
    "rollout_matching__max_new_tokens": 128,
    "rollout_matching__decode_batch_size": 2,
    "rollout_matching__decoding__temperature": 0.0,
}


class Own(NamedTuple):
    """Scenes, and transformers' answers to them."""

    folder: Path
    answers: list[ImageAnswer]

    @property
    def data(self) -> Path:
        return self.folder / "scenes.jsonl"

    def run(self, **keys: Any) -> Path:
        return write_run(self.folder, 1, DEMO, **KEYS | keys)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Own:
    folder = tmp_path_factory.mktemp("predict")
    write_scenes(folder, IMAGES, SPARSE, 77)
    found = Own(folder, [])
    with pytest.raises(SystemExit) as exit_:
        main(["predict", str(found.run()), str(found.data), "--out", str(folder / "hf")])
    assert not exit_.value.code
    found.answers.extend(read_answers(folder / "hf"))
    assert sum(len(answer.pred) for answer in found.answers) > IMAGES, "answers without objects would show nothing"
    return found


def assert_same(found: Sequence[ImageAnswer], expected: Sequence[ImageAnswer]) -> None:
    assert Counter(Path(a.image).name for a in found) == Counter(Path(a.image).name for a in expected)
    by_image = {Path(answer.image).name: answer for answer in expected}
    for answer in found:
        other = by_image[Path(answer.image).name]
        assert (answer.text, answer.num_tokens, answer.truncated) == (other.text, other.num_tokens, other.truncated)
        assert [(o.desc, o.bins) for o in answer.pred] == [(o.desc, o.bins) for o in other.pred]
        scores = [obj.score for obj in other.pred]
        assert None not in scores and [obj.score for obj in answer.pred] == pytest.approx(scores, abs=SCORED_ALIKE)


def test_predict_with_a_colocated_engine(own: Own, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = own.run(**COLOCATED)
    out = tmp_path / "jsonl"
    first = run_cli(capsys, "predict", run, own.data, "--out", out, "--limit", 3, "--json")
    assert json.loads(first.out)["resumed"] == 0
    whole = run_cli(capsys, "predict", run, own.data, "--out", out, "--json")
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


def closed_config(folder: Path, program: str) -> dict[str, Any]:
    closed: dict[str, Any] = {"rollout_matching__vllm__server__closed_names": True}
    return server_config(folder, 1, DEMO, launch={"server": program, "wait_s": 240.0}, **KEYS | closed)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("served")
    config = closed_config(folder, "coordexp")
    with serving(folder / "server", config, by_shell=True):
        yield config


@pytest.mark.parametrize("program", ["coordexp", "swift"])
def test_class_names_in_servers(
    own: Own, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, program: str
) -> None:
    """The answers are those of transformers; a call without a list is not limited."""
    asked = ("--classes", ",".join(NAMES), "--limit", 4, "--out")
    assert run_cli(capsys, "predict", own.run(), own.data, *asked, tmp_path / "hf").code == 0
    with ExitStack() as stack:
        if program == "coordexp":
            config = request.getfixturevalue("served")
        else:
            config = closed_config(tmp_path, program)
            stack.enter_context(swift_rollout(tmp_path / "server", config))
        run = own.run(**server_keys(config))
        done = run_cli(capsys, "predict", run, own.data, *asked, tmp_path / "listed")
        assert done.code == 0, done.err
        assert run_cli(capsys, "predict", run, own.data, "--out", tmp_path / "free").code == 0
    assert_same(read_answers(tmp_path / "listed"), read_answers(tmp_path / "hf"))
    said = {obj.desc for answer in read_answers(tmp_path / "listed") for obj in answer.pred}
    assert said and said <= set(NAMES)
    assert_same(read_answers(tmp_path / "free"), own.answers)


def test_predict_with_servers_resumes_after_a_kill(
    own: Own, served: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own.run(**server_keys(served))
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
