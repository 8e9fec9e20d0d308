"""``from coordexp import Detector``: images of any kind in, objects in their own pixels out."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coordexp.checkpoints.card import read_card, write_card
from coordexp.data.files import asset
from coordexp.data.preparation import ImagePreparation
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.errors import CheckpointError, ConfigError, DataError, DetectorClosed, MissingDependency
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.inference.detections import Detections, as_detections
from coordexp.inference.detector import Detector
from support.installed import needs


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 3, SPECS["framed"], 4)
    return folder / "images"


@pytest.fixture(scope="module")
def detector() -> Iterator[Detector]:
    with Detector(asset("checkpoints/demo-stage1"), device="cpu", batch_size=2) as found:
        yield found


def test_importing_the_package_is_instant() -> None:
    code = (
        "import sys, coordexp\n"
        "heavy = {'torch', 'numpy', 'PIL', 'transformers', 'pydantic'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
        "assert 'Detector' in dir(coordexp) and 'importlib' not in dir(coordexp)\n"
        "try:\n    coordexp.Detectr\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no attribute 'Detectr'" in done.stdout


def test_file_image_and_array_give_the_same_answer(detector: Detector, scenes: Path) -> None:
    import coordexp

    assert coordexp.Detector is Detector
    path = scenes / "000000.png"
    image = Image.open(path)
    one = detector.predict(path)
    assert isinstance(one, Detections) and len(one) > 0 and one.source == str(path)
    several = detector([image, np.array(image), str(path), path.read_bytes()])
    assert [found.objects for found in several] == [one.objects] * 4
    assert [found.source for found in several] == ["image 0", "image 1", str(path), "image 3"]
    assert detector.predict(image).objects == one.objects


def test_detections_are_in_pixels(detector: Detector, scenes: Path) -> None:
    """The demo's model finds the shapes of its scenes: a wrong unit or a swapped side would not."""
    from coordexp.data import read_jsonl
    from coordexp.geometry import pixel_box

    (record, *_) = read_jsonl(scenes.parent / "scenes.jsonl")
    found = detector.predict(record.image)
    assert (found.width, found.height) == (record.width, record.height)
    truth = {obj.desc: pixel_box(obj, record.width, record.height) for obj in record.objects}
    shared = [obj for obj in found if obj.name in truth]
    assert shared and all(0 <= obj.score <= 1 and 0 <= obj.confidence <= 1 for obj in shared)
    nearest = min(max(abs(a - b) for a, b in zip(obj.box, truth[obj.name], strict=True)) for obj in shared)
    assert nearest < 0.15 * record.width


def test_a_folder_and_a_pattern_give_a_list_in_order(detector: Detector, scenes: Path) -> None:
    folder = detector.predict(scenes)
    assert [Path(found.source).name for found in folder] == ["000000.png", "000001.png", "000002.png"]
    assert [f.objects for f in detector.predict(str(scenes / "*.png"))] == [f.objects for f in folder]
    assert detector.predict([]) == []


def test_a_broken_image_does_not_lose_the_others(detector: Detector, scenes: Path, tmp_path: Path) -> None:
    broken, thin, clip = tmp_path / "a.jpg", tmp_path / "b.png", tmp_path / "c.mp4"
    broken.write_bytes(b"no image")
    Image.new("RGB", (3000, 12)).save(thin)
    clip.write_bytes(b"0")
    good = scenes / "000000.png"
    with pytest.warns(UserWarning, match=r"2 of 4.*a\.jpg"):
        found = detector([good, broken, thin, good])
    assert [one.error is None for one in found] == [True, False, False, True]
    assert found[0].objects == found[3].objects and not found[1] and str(broken) in str(found[1].problem)
    (tmp_path / "d.png").write_bytes(good.read_bytes())
    (tmp_path / "e: f.jpg").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="4 of 5"):
        folder = detector(tmp_path)
    assert [Path(one.source).name for one in folder] == ["a.jpg", "b.png", "c.mp4", "d.png", "e: f.jpg"]
    assert folder[3].objects == found[0].objects and "ffmpeg" in folder[2].error
    with pytest.raises(DataError, match="nothing to draw"):
        folder[2].plot()
    empty_crop = Image.open(good).crop((5, 5, 5, 9))
    for single in (broken, thin, clip, b"no image", empty_crop):
        with pytest.raises(DataError):
            detector(single)
    with pytest.warns(UserWarning, match="1 of 2.*0x4 has no pixels"):
        assert detector([empty_crop, good])[1].objects == found[0].objects


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, "NoneType"), ([None], "image 0: NoneType"), ({"a": 1}, "dict"), (torch.zeros(3, 8, 8), "image 0: Tensor"),
     (io.BytesIO(b"a\nb"), "BytesIO"), (bytearray(b"a"), "bytearray"), ([io.BytesIO()], "image 0: BytesIO"),
     (["https://example.com/a.jpg"], "https://example.com/a.jpg"), ("s3://bucket/a.jpg", "address"),
     ("", "empty name"), (["a.png", ""], "empty name"),
     (np.zeros((4, 4, 3), dtype=np.float32), r"uint8.*\(height, width, 3\)"),
     (np.zeros((3, 8, 8), dtype=np.uint8), r"uint8.*\(height, width, 3\)")],
)  # fmt: skip
def test_something_else_than_an_image_is_named(detector: Detector, given: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        detector(given)


@pytest.mark.parametrize("options", [{"min_confidence": "0.5"}, {"min_confidence": 50}, {"prompt": 3}])
def test_an_option_of_a_wrong_kind_is_refused(detector: Detector, scenes: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        detector(scenes / "000000.png", **options)


def test_classes_prompt_and_confidence_of_one_call(detector: Detector, scenes: Path) -> None:
    path = scenes / "000000.png"
    whole = detector(path)
    assert {obj.name for obj in detector(path, classes=["red circle"])} == {"red circle"}
    assert detector(path, prompt="Something else entirely, at length.").text != whole.text
    least = float(np.sort(whole.confidences)[len(whole) // 2])
    assert detector(path, min_confidence=least).objects == tuple(o for o in whole if o.confidence >= least)
    of_numpy: Any = np.float32(0)
    assert detector(path, min_confidence=of_numpy) == whole
    assert detector(path) == whole, "one call's options are not the next one's"
    assert whole.classes == detector.classes and set(whole.names) <= set(detector.classes)


def test_class_names_number_the_classes_of_a_checkpoint_without_a_list(scenes: Path, tmp_path: Path) -> None:
    model = shutil.copytree(asset("checkpoints/demo-stage1"), tmp_path / "model")
    write_card(replace(read_card(model), classes=()), model)
    with Detector(model, device="cpu") as detector:
        found = detector(scenes / "000000.png", classes=["yak", " red circle", "yak"])
    assert found.classes == ("yak", "red circle")
    assert {(one["category_name"], one["category_id"]) for one in found.to_coco()} <= {("yak", 1), ("red circle", 2)}


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "mps", *([] if torch.cuda.is_available() else ["cuda", "cuda:7"])])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        Detector(asset("checkpoints/demo-stage1"), device=device)


def test_a_batch_of_no_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode_batch_size"):
        Detector(asset("checkpoints/demo-stage1"), device="cpu", batch_size=0)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_detector_is_not_sent_to_another_process(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="make one there"):
        copied(Detector.__new__(Detector))


def test_loading_is_quiet_and_closed_means_closed(scenes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Detector(asset("checkpoints/demo-stage1"), device="cpu", scores=False) as detector:
        assert "Loading weights" not in capfd.readouterr().err
        assert np.isnan(detector(scenes / "000000.png").confidences).all()
        with pytest.raises(ConfigError, match="min_confidence"):
            detector(scenes / "000000.png", min_confidence=0.5)
    with pytest.raises(DetectorClosed):
        detector(scenes / "000000.png")


def test_threads_load_detectors_at_once() -> None:
    """As a server's threads do at its first requests. transformers' own loading leaves a function replaced for good:
    every later model of the process then lacked ``lm_head.weight``."""

    def load(_: int) -> None:
        Detector(asset("checkpoints/demo-stage1"), device="cpu").close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(load, range(6)))
    load(0)


def test_an_image_far_from_the_trained_size_is_announced(
    scenes: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Also if no resize rule is known. The demo's own checkpoint has one, by which it finds enlarged shapes."""
    enlarged = Image.open(scenes / "000000.png").resize((1000, 800))
    model = tmp_path / "model"
    shutil.copytree(asset("checkpoints/demo-stage1"), model)
    with Detector(model, device="cpu") as with_rule:
        assert len(with_rule(enlarged)) > 0 and not recwarn.list
    write_card(replace(read_card(model), preparation=ImagePreparation(None, (16384, 16384))), model)
    with Detector(model, device="cpu", max_new_tokens=8) as detector, pytest.warns(UserWarning, match="16,384"):
        found = detector(enlarged)
    assert "cut off after 8 tokens" in repr(found)


def test_a_missing_image_and_a_missing_checkpoint_are_named(detector: Detector, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg"):
        detector.predict(tmp_path / "gone.jpg")
    with pytest.raises(CheckpointError, match="no such folder"):
        Detector(tmp_path / "nothing")


@pytest.fixture
def detections(tmp_path: Path) -> Detections:
    Image.new("RGB", (200, 101), "white").save(tmp_path / "a.png")
    pred = (
        ScoredObject("cat", "bbox_2d", (0, 0, 999, 999), 0.75, 0.5),
        ScoredObject("kite", "poly", (0, 0, 999, 0, 999, 999), None),
    )
    return as_detections(ImageAnswer("a.png", str(tmp_path / "a.png"), 200, 101, None, pred))


def test_pixels_are_those_of_the_image(detections: Detections) -> None:
    assert detections.boxes.tolist() == [[0, 0, 200, 101], [0, 0, 200, 101]]
    assert detections.polygons == [None, ((0, 0), (200, 0), (200, 101))]
    assert detections.names == ["cat", "kite"] and detections.scores[0] == 0.75 and np.isnan(detections.scores[1])


def test_detections_are_indexed_sliced_and_filtered(detections: Detections) -> None:
    cat, kite = detections
    assert detections[0] == cat and detections[-1] == kite
    assert detections[1:].objects == (kite,) and detections[[1, 0]].objects == (kite, cat)
    sure = detections[detections.confidences > 0.4]
    assert sure.objects == (cat,) and sure.names == ["cat"] and len(sure.to_coco(category_ids={"cat": 1})) == 1
    assert not detections[[]] and "1 cat" in repr(sure) and "kite" not in repr(sure)


def test_detections_as_json(detections: Detections) -> None:
    written = json.loads(detections.to_json())
    assert written["objects"][0] == {
        "name": "cat", "confidence": 0.5, "score": 0.75, "box": list(detections[0].box), "polygon": None
    }  # fmt: skip


@needs("pandas")
def test_detections_as_a_table(detections: Detections) -> None:
    table = detections.to_pandas()
    assert table["name"].tolist() == ["cat", "kite"] and table["x2"].tolist() == detections.boxes[:, 2].tolist()


def test_notebooks_show_the_drawn_image(detections: Detections) -> None:
    with Image.open(io.BytesIO(detections._repr_png_() or b"")) as shown:
        assert shown.format == "PNG" and shown.convert("RGB").tobytes() == detections.plot().tobytes()


def test_coco_results(detections: Detections) -> None:
    cat, kite = detections.to_coco(image_id=17, category_ids={"cat": 4})
    assert (cat["image_id"], cat["category_id"], cat["score"], cat["bbox"]) == (17, 4, 0.75, [0, 0, 200, 101])
    assert (kite["category_id"], kite["category_name"]) == (5, "kite")
    assert kite["segmentation"] == [[0, 0, 200, 0, 200, 101]] and "segmentation" not in cat


def test_drawing_marks_the_outlines_and_leaves_the_file(detections: Detections, tmp_path: Path) -> None:
    before = (tmp_path / "a.png").read_bytes()
    drawn = detections.draw(tmp_path / "out" / "drawn.png")
    assert drawn.size == (600, 303)  # small images are enlarged
    with pytest.raises(DataError, match="name another file"):
        detections.save(tmp_path / "a.png")
    for name in ("drawn", "drawn.jpgg", "drawn.txt"):
        with pytest.raises(DataError, match=rf"{name}: is not the name of a picture; end it in \.png"):
            detections.save(tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "a.png").read_bytes() == before
    with Image.open(tmp_path / "out" / "drawn.png") as saved:
        assert saved.convert("RGB").getpixel((300, 301)) != (255, 255, 255)


def test_missing_supervision_package_names_the_install_command(
    detections: Detections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(MissingDependency, match="supervision"):
        detections.to_supervision(["cat"])


def test_supervision_gets_its_fields(detections: Detections, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package where it is installed; else with a stand-in that only keeps what it is given."""
    try:
        import supervision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:

        class StandIn:
            def __init__(self, **given: Any) -> None:
                self.__dict__.update(given)

        module = types.ModuleType("supervision")
        module.Detections = StandIn  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "supervision", module)
    with pytest.raises(DataError, match="classes"):
        detections.to_supervision()
    found = detections.to_supervision(["dog", "cat"])
    assert found.xyxy.tolist() == [[0, 0, 200, 101], [0, 0, 200, 101]]
    assert found.confidence.tolist() == [0.5, 1.0] and found.class_id.tolist() == [1, 2]
    assert detections[1:].to_supervision(["dog", "kite"]).class_id.tolist() == [1]
    assert list(found.data["class_name"]) == ["cat", "kite"]
    assert found.mask.shape == (2, 101, 200)
    assert found.mask[0].sum() == 200 * 101 and 0.4 < found.mask[1].mean() < 0.6
    # A box, a polygon, and no object.
    assert detections[:1].to_supervision(["dog"]).mask is None and found.mask is not None
    assert [detections[k:2].to_supervision(["dog"], masks=True).mask.shape for k in (0, 1, 2)] == [
        (2, 101, 200), (1, 101, 200), (0, 101, 200),
    ]  # fmt: skip
    assert detections.to_supervision(["dog"], masks=False).mask is None


def test_several_answers_are_merged(detector: Detector, scenes: Path) -> None:
    model, images = asset("checkpoints/demo-stage1"), sorted(scenes.rglob("*.png"))[:2]
    runs: list[list[Detections]] = []
    for batch_size in (4, 9):
        with Detector(model, device="cpu", batch_size=batch_size, answers=3, temperature=1.0) as several:
            runs.append(several.predict(images))
    single = detector.predict(images)
    # Deterministic, whatever the batch; scores are sums in floating point.
    assert [found.answer.further_texts for found in runs[0]] == [found.answer.further_texts for found in runs[1]]
    assert [[obj.answers for obj in found] for found in runs[0]] == [
        [obj.answers for obj in found] for found in runs[1]
    ]
    for found, one in zip(runs[0], single, strict=True):
        assert len(found.answer.further_texts) == 2 and found.answer.num_answers == 3
        assert found.text == one.text, "the first answer is the greedy one"
        assert [obj.box for obj in found[: len(one)]] == [obj.box for obj in one]
        assert all(obj.answers in (1, 2, 3) and 0 <= (obj.confidence or 0) <= 1 for obj in found)
        assert json.loads(found.to_json())["objects"][0]["answers"] == found[0].answers
        assert "answers" not in json.loads(one.to_json())["objects"][0]
    assert any(obj.answers not in (None, 3) for found in runs[0] for obj in found), "samples differ"


def test_shares_are_confidences_without_scores(scenes: Path) -> None:
    with Detector(asset("checkpoints/demo-stage1"), device="cpu", scores=False, answers=2) as several:
        found = several.predict(sorted(scenes.rglob("*.png"))[0], min_confidence=0.75)
    assert len(found) and {obj.confidence for obj in found} == {1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answers": 0}, "answers: 0; give 1 to 1000"),
        ({"answers": 1001}, "answers: 1001; give 1 to 1000"),
        ({"answers": 2, "temperature": 0}, "temperature: 0 makes no sampled answers"),
        ({"temperature": 0.5}, "a single answer is greedy; give answers="),
        ({"answers": 1.5}, "answers: 1.5; give a whole number"),
        ({"answers": 2, "temperature": "1"}, "temperature: 1 makes no sampled answers; give a number above 0"),
        ({"max_new_tokens": "20"}, "max_new_tokens: '20'; give a whole number"),
        ({"batch_size": True}, "batch_size: True; give a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a number greater than or equal to 1, got 0"),
    ],
)
def test_impossible_answers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Detector(asset("checkpoints/demo-stage1"), **options)
