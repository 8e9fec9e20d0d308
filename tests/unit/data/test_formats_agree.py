"""The same scene through every format gives the same records, and those evaluate against themselves as perfect."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordexp.data import read_jsonl
from coordexp.data.convert import ConversionReport, convert_coco, convert_labelme, convert_voc, convert_yolo
from coordexp.evaluation import Detection, EvaluationOptions, ImageAnswer, summarise
from coordexp.records import ImageRecord
from support.annotation_folders import SMALL
from support.one_scene import BOXES, RINGS, as_coco, as_labelme, as_voc, as_yolo


def convert(form: str, source: Path, out: Path, *, rings: bool) -> ConversionReport:
    match form:
        case "voc":
            return convert_voc(as_voc(source), out, name="data", options=SMALL)
        case "coco":
            geometry = "poly" if rings else "bbox"
            return convert_coco(*as_coco(source, rings=rings), out, name="data", geometry=geometry, options=SMALL)
        case "yolo":
            return convert_yolo(as_yolo(source, rings=rings), out, split="train", name="data", options=SMALL)
        case "yolo without data.yaml":
            folder = as_yolo(source, rings=rings, data_yaml=False)
            return convert_yolo(folder, out, split="train", name="data", options=SMALL)
        case "labelme":
            return convert_labelme(as_labelme(source, rings=rings), out, name="data", options=SMALL)
    raise AssertionError(form)


def told(records: list[ImageRecord]) -> list[tuple]:
    return [(r.image.name, r.width, r.height, r.objects, r.metadata) for r in records]


FORMS = ["voc", "coco", "yolo", "yolo without data.yaml", "labelme"]


@pytest.mark.parametrize("rings", [False, True], ids=["boxes", "polygons"])
def test_every_format_gives_the_same_records(tmp_path: Path, rings: bool) -> None:
    found = {}
    for form in FORMS[1:] if rings else FORMS:
        report = convert(form, tmp_path / form / "in", tmp_path / form / "out", rings=rings)
        found[form] = told(read_jsonl(report.jsonl, check_images=True))
        assert (report.images_seen, report.images, report.skipped) == (2, 2, {}), form
        assert report.objects == report.objects_seen == len(RINGS if rings else BOXES), form
    reference = found["coco"]
    assert {kind for obj in reference[0][3] for kind in [obj.kind]} == {"poly" if rings else "bbox_2d"}
    for form, records in found.items():
        assert records == reference, form


@pytest.mark.parametrize(
    ("form", "rings"),
    [(form, False) for form in FORMS] + [(form, True) for form in FORMS[1:]],  # VOC has boxes only
)
def test_what_was_annotated_predicted_is_perfect(tmp_path: Path, form: str, rings: bool) -> None:
    records = read_jsonl(convert(form, tmp_path / "in", tmp_path / "out", rings=rings).jsonl)
    answers = [
        ImageAnswer(r.sample_id, str(r.image), r.width, r.height, r.objects,
                    tuple(Detection(o.desc, o.kind, o.bins, 0.5) for o in r.objects))
        for r in records
    ]  # fmt: skip
    figures = summarise(answers, EvaluationOptions(segm=True)).figures
    assert {figures[name] for name in ("f1", "precision", "recall", "mean_matched_iou")} == {1.0}
    for name in ("AP", "AP50", "AP75", "segm_AP", "AR100"):
        assert figures[name] == pytest.approx(1.0), name
