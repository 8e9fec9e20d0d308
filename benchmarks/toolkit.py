"""The cost of the work around training: converting images, measuring answers, building the viewer's page.

Conversion reads and writes real files in a temporary folder. The evaluation is what ``coordexp evaluate`` does with
saved answers: one-to-one matching, counts by class and density, and average precision of the whole and by density.
Average precision alone is measured too, by us (faster-coco-eval) and by pycocotools, from the same dicts in COCO's
format; both must find the same. Rows are printed as they are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console

from coordexp.data.convert import ImageOptions, convert_coco
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers
from coordexp.evaluation.coco_results import CocoData, average_precision, to_coco
from coordexp.evaluation.compare import compare
from coordexp.evaluation.summary import summarise
from coordexp.records import GTObject
from coordexp.viewer.collect import collect
from coordexp.viewer.render import render

_CLASSES = [f"class {k}" for k in range(20)]
_SIZE = (640, 480)


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--images", type=positive, default=200, help="images to convert [200]")
    flags.add_argument("--answers", type=positive, default=5000, help="images whose answers are evaluated [5000]")
    flags.add_argument("--objects", type=positive, default=30, help="objects of each answer [30]")
    flags.add_argument("--records", type=positive, default=1000, help="records on the viewer's page [1000]")
    flags.add_argument("--resamples", type=positive, default=200, help="resamples of the comparison [200]")
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    print_machine(console, where, threads=threads)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), options):
            for name, found in row.items():
                told = ", ".join(f"{ratio:.2f} x {peer}'s" for peer, ratio in found.get("cpu_ratios", {}).items())
                console.print(
                    f"{name:<64} {found['seconds']:>8.2f} s, {found['cpu_seconds']:>7.2f} s of a processor "
                    f"{found['rate']:>9,.0f} {found['unit']}/s  {told}",
                    highlight=False, markup=False, soft_wrap=True,
                )  # fmt: skip
            results |= row
    write_json(options.json, "toolkit", where, {**vars(options), "threads": threads}, results)


def rows(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """Each measurement, when it is done."""
    yield convert(folder / "convert", options.images)
    yield from evaluate(options.answers, options.objects, options.resamples)
    yield view(folder / "view", options.records)


class Watch:
    """Seconds, and processor seconds of this process, since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def row(self, what: str, count: int, unit: str) -> dict[str, dict[str, Any]]:
        """The row of what was done since."""
        seconds, cpu_seconds = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "count": count, "unit": unit}
        return {what: {**figures, "rate": count / seconds}}


def convert(folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """COCO to JSONL: decode, resize, encode every image; 30 boxes each."""
    rng = np.random.default_rng(0)
    images_dir = folder / "images"
    images_dir.mkdir(parents=True)
    noise = Image.fromarray(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8)).resize(_SIZE)
    annotations = []
    for k in range(count):
        noise.save(images_dir / f"{k}.jpg", quality=90)
        for x, y in rng.integers(0, 400, (30, 2)).tolist():
            annotations.append({"id": len(annotations), "image_id": k, "category_id": 1, "bbox": [x, y, 40, 40]})
    content = {
        "images": [{"id": k, "file_name": f"{k}.jpg", "width": _SIZE[0], "height": _SIZE[1]} for k in range(count)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "thing"}],
    }
    source = folder / "data.json"
    source.write_text(json.dumps(content))
    watch = Watch()
    workers = min(8, os.cpu_count() or 1)
    report = convert_coco(
        source, images_dir, folder / "out", options=ImageOptions(max_pixels=512 * 512, workers=workers)
    )
    row = watch.row(f"convert {count} images of {_SIZE[0]}x{_SIZE[1]}, {workers} threads", count, "images")
    assert report.images == count, "every image must have been converted"
    return row


def evaluate(count: int, objects: int, resamples: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Average precision by pycocotools, all figures by us, and the comparison of two runs."""
    answers = make_answers(count, objects, seed=1)
    data = to_coco(answers)
    summarise(answers[:2])  # imports of the first call do not count
    what = f"{count} images x {objects} objects"
    watch = Watch()
    expected = pycocotools_ap(data)
    peer = watch.row(f"pycocotools: average precision of {what}", count, "images")
    (cpu,) = (row["cpu_seconds"] for row in peer.values())
    yield peer
    for name, measure_ours in (
        (f"coordexp: average precision of {what}", lambda: average_precision(data).figures),
        (f"evaluate {what}: every figure", lambda: summarise(answers).figures),
    ):
        watch = Watch()
        figures = measure_ours()
        ((name, row),) = watch.row(name, count, "images").items()
        assert 0 < figures["AP"] < 1, "the benchmark's own answers must be neither perfect nor useless"
        assert abs(figures["AP"] - expected) < 1e-6, (figures["AP"], expected)
        yield {name: {**row, "cpu_ratios": {"pycocotools": row["cpu_seconds"] / cpu}}}
    few = answers[: max(2, count // 10)]
    others = make_answers(count, objects, seed=2, like=few)
    watch = Watch()
    compare(few, others, resamples=resamples)
    yield watch.row(f"compare two runs of {len(few)} images, {resamples} resamples", len(few), "images")


def pycocotools_ap(data: CocoData) -> float:
    """Its own figure, from scratch."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth: Any = COCO()
        truth.dataset = data.ground_truth
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(data.results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def make_answers(count: int, objects: int, seed: int, like: Sequence[ImageAnswer] | None = None) -> list[ImageAnswer]:
    """Boxes; four of five are found, a little off. ``like``: answers whose ground truth is answered again."""
    rng = np.random.default_rng(seed)
    answers = []
    for k in range(count if like is None else len(like)):
        truth = like[k].truth if like is not None else _truth(rng, objects)
        found = tuple(
            ScoredObject(obj.desc, obj.kind, _moved(rng, obj.bins), round(float(rng.random()), 4))
            for obj in truth
            if rng.random() < 0.8
        )
        answers.append(ImageAnswer(f"s{k}", f"{k}.png", *_SIZE, truth, found))
    return answers


def _truth(rng: np.random.Generator, objects: int) -> tuple[GTObject, ...]:
    corner_N2, side_N2 = rng.integers(0, 850, (objects, 2)), rng.integers(20, 149, (objects, 2))
    boxes = np.concatenate([corner_N2, corner_N2 + side_N2], axis=1).tolist()
    names = rng.integers(0, len(_CLASSES), objects).tolist()
    return tuple(GTObject(_CLASSES[name], "bbox_2d", tuple(box)) for name, box in zip(names, boxes, strict=True))


def _moved(rng: np.random.Generator, bins: tuple[int, ...]) -> tuple[int, ...]:
    dx, dy = rng.integers(-8, 9, 2).tolist()
    return tuple(min(999, max(0, k + (dx, dy)[at % 2])) for at, k in enumerate(bins))


def view(folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """Read answers, match them, embed their images, write the page."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    answers = []
    for k, answer in enumerate(make_answers(count, 10, seed=3)):
        path = folder / f"{k}.jpg"
        Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize(_SIZE).save(path, quality=85)
        answers.append(ImageAnswer(answer.sample_id, str(path), *_SIZE, answer.gt, answer.pred))
    write_answers(answers, folder / "predictions.jsonl")
    watch = Watch()
    page = render(collect(folder, max_records=count))
    (folder / "view.html").write_text(page, encoding="utf-8")
    return watch.row(f"viewer page of {count} records with images, {len(page) / 1e6:.0f} MB", count, "records")


if __name__ == "__main__":
    main()
