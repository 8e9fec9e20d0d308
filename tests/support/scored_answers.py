"""Random scored answers for evaluation's tests and benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.evaluation.detection import count_image, sum_counts
from coordexp.records import GTObject

CLASSES = ("person", "car", "手提包", "red cell")


def random_answers(count: int, seed: int, per_image: int = 8, polygons: float = 0.3) -> list[ImageAnswer]:
    """Images of several sizes; most objects found a little off, some missed, some invented, some called otherwise."""
    rng = np.random.default_rng(seed)
    return [_answer(rng, f"s{i}", int(rng.integers(0, per_image + 1)), polygons) for i in range(count)]


def answered_again(answers: list[ImageAnswer], seed: int) -> list[ImageAnswer]:
    """Another run's random answers for the same pictures."""
    again = random_answers(len(answers), seed)
    return [replace(b, width=a.width, height=a.height) for a, b in zip(answers, again, strict=True)]


def with_soft(answers: list[ImageAnswer], seed: int) -> list[ImageAnswer]:
    rng = np.random.default_rng(seed)
    return [
        replace(answer, gt=tuple(replace(o, soft=0.5) if rng.random() < 1 / 3 else o for o in answer.gt or ()))
        for answer in answers
    ]


def detection_counts(answers: Iterable[ImageAnswer]) -> Counter[str]:
    return sum_counts(count_image(answer).counts for answer in answers)


def _answer(rng: np.random.Generator, name: str, count: int, polygons: float) -> ImageAnswer:
    truth = [_object(rng, polygons) for _ in range(count)]
    found: list[ScoredObject] = []
    for obj in truth:
        if rng.random() < 0.8:
            shift = np.tile(rng.integers(-25, 26, 2), len(obj.bins) // 2)
            desc = obj.desc if rng.random() < 0.9 else str(rng.choice([*CLASSES, "unheard of"]))
            found.append(ScoredObject(desc, obj.kind, _bins(np.array(obj.bins) + shift), _score(rng)))
    for _ in range(int(rng.integers(0, 3))):
        obj = _object(rng, polygons)
        found.append(ScoredObject(obj.desc, obj.kind, obj.bins, _score(rng)))
    width, height = (int(side) for side in rng.integers(40, 900, 2))
    return ImageAnswer(name, f"{name}.png", width, height, tuple(truth), tuple(found), num_tokens=30 * len(found))


def _score(rng: np.random.Generator) -> float:
    return round(float(rng.random()), 2)  # coarse, so that equal scores happen


def _object(rng: np.random.Generator, polygons: float) -> GTObject:
    desc = str(rng.choice(CLASSES))
    centre, half = rng.integers(60, 940, 2), rng.integers(5, 160, 2)
    if rng.random() < polygons:
        angle = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(5, 10))))
        return GTObject(desc, "poly", _bins(centre + half * np.stack([np.cos(angle), np.sin(angle)], axis=1)))
    return GTObject(desc, "bbox_2d", _bins(np.concatenate([centre - half, centre + half])))


def _bins(values: np.ndarray) -> tuple[int, ...]:
    return tuple(np.clip(np.round(values).astype(int), 0, 999).reshape(-1).tolist())
