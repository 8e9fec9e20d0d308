"""A million random answers through parse, match and build, each checked against every invariant.

    make fuzz                                                 # all cores, FUZZ_EXAMPLES=1000000
    python tests/fuzz/fuzz_targets.py --seed 5 --case 1234    # one case again

Case k of a seed is the same on every machine, whatever runs beside it; tokenizers take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from coordexp.coords.serialize import FieldOrder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from coordexp.coords import TURN_END, CoordVocab, serialize_objects
from coordexp.records import GTObject
from coordexp.targets import TargetPolicy
from support.answers import outcome_of
from support.parse_invariants import VOCABS, as_gt, check_parse
from support.rewritten_invariants import check_rewritten
from support.target_invariants import check_target

CHUNK = 250  # cases a worker takes at a time
SAY_EVERY_S = 10.0

WORDS = [
    "black cat",
    "U.S.",
    "wow!",
    'a "quote"',
    "雪豹 🐆",
    "back\\slash",
    "}{][",
    "x,",
    "龘",
    "é",
    "] }, object_3",
    "𓃠",
]
CHARS = 'abz 09.,:;!?"\\/{}[]()_-+=#@é龘🦖日本\u0301\u200d'
SNIPPETS = [
    *'{}[]:,"\\ \n-01e.', "}}", "},", '"}}', '"]', '"},', "{}", '{"', ' {"', '":', '",', ' "', ' ["', "]]", "true",
    "object_1", "object_", "desc", "bbox_2d", "poly", "cat", "龘", "<|coord_1|>", "<|coord_9|>", "<|coord_*|>",
    "<|image_pad|>", "<think>", TURN_END, '"object_2": {"desc": "', '"bbox_2d": ["', '"object_3": {}', "Sure! ",
    "nul", "```json\n", ', "object_9": 5', "'",
]  # fmt: skip


def run_case(seed: int, case: int) -> None:
    """Make case ``case`` of ``seed`` and check it. Raises where an invariant does not hold."""
    rng = random.Random(f"{seed}:{case}")
    vocab = VOCABS[case % len(VOCABS)]()
    scene = [random_object(rng) for _ in range(random_count(rng))]
    order = rng.choice(get_args(FieldOrder))
    text = serialize_objects(scene, order)
    whole = [*vocab.encode(text), vocab.eos_id]
    assert vocab.encode_answer(text) == whole[:-1]
    kind = rng.random()
    if kind >= 0.1:
        text = restyled(rng, text)
        whole = [*vocab.encode(text), vocab.eos_id]
    if kind < 0.1:
        ids = whole
    elif kind < 0.6:
        ids = edited(rng, whole, vocab)
    elif kind < 0.75:
        ids = vocab.encode(edited_text(rng, text))
    elif kind < 0.9:
        head = rng.choice(['{"object_1": ', "{", "", text[:-1]])
        ids = vocab.encode(head) + [random_token(rng, vocab) for _ in range(rng.randint(0, 40))]
    else:
        ids = edited(rng, vocab.encode(other_json(rng)), vocab)
    parsed = check_parse(ids, vocab, [random_object(rng) for _ in range(rng.choice([0, 0, 1, 2]))])
    if kind < 0.1:
        assert [as_gt(obj) for obj in parsed.objects] == scene and parsed.dropped == {} and not parsed.truncated
    truth = random_truth(rng, scene)
    order = rng.choice(get_args(FieldOrder))
    check_target(outcome_of(ids, truth, vocab, field_order=order), truth, vocab)
    policy = TargetPolicy(
        "rewritten",
        rng.choice(["mask", "drop", "soft"]),
        rng.choice(["keep", "drop", "replace"]),
        rng.choice(["append", "in_order"]),
    )
    truth = [replace(obj, soft=rng.choice([None, None, 0.3, 1.0])) for obj in truth]
    sure = [rng.random() for _ in range(7)]
    got = outcome_of(ids, truth, vocab, confidence=lambda i: sure[i % 7], field_order=order, policy=policy)
    check_rewritten(got, truth, vocab, policy)


def random_count(rng: random.Random) -> int:
    """0 to 60 objects, mostly few: what goes wrong goes wrong with few, but not only."""
    return rng.choice([0, 1, 1, 2, 2, 3, 4, 6]) if rng.random() < 0.93 else rng.randint(7, 60)


def random_object(rng: random.Random) -> GTObject:
    desc = rng.choice(WORDS)
    if rng.random() < 0.3:
        desc = normal("".join(rng.choice(CHARS) for _ in range(rng.randint(1, 12)))) or "x"
    bins = [min(999, max(0, int(rng.gauss(rng.choice([20, 300, 500, 980]), 60)))) for _ in range(2 * rng.randint(3, 9))]
    if rng.random() < 0.3:
        return GTObject(desc, "poly", tuple(bins))
    (x1, x2), (y1, y2) = sorted(bins[:2]), sorted(bins[2:4])
    return GTObject(desc, "bbox_2d", (x1, y1, x2, y2))


def normal(desc: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", desc).strip()


def random_truth(rng: random.Random, scene: Sequence[GTObject]) -> list[GTObject]:
    """Some of the scene, a little moved, and a few others."""
    truth = [random_object(rng) for _ in range(rng.choice([0, 0, 1, 3]))]
    for obj in scene:
        if rng.random() < 0.7:
            bins = tuple(min(999, max(0, k + rng.randint(-12, 12))) for k in obj.bins)
            if obj.kind == "bbox_2d":
                bins = (min(bins[0], bins[2]), min(bins[1], bins[3]), max(bins[0], bins[2]), max(bins[1], bins[3]))
            truth.append(GTObject(obj.desc, obj.kind if rng.random() < 0.9 else "bbox_2d", bins)
                         if obj.kind == "bbox_2d" or rng.random() < 0.8 else random_object(rng))  # fmt: skip
    rng.shuffle(truth)
    return [obj for obj in truth if obj.kind == "poly" or len(obj.bins) == 4]


def random_token(rng: random.Random, vocab: CoordVocab) -> int:
    if rng.random() < 0.3:
        return rng.randint(0, len(vocab) + 5)
    return rng.choice(vocab.encode(rng.choice(SNIPPETS)))


def edited(rng: random.Random, ids: Sequence[int], vocab: CoordVocab) -> list[int]:
    """Delete, insert, replace, swap, repeat and truncate, at any position, up to four times."""
    ids = list(ids)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        at = rng.randint(0, len(ids))
        match rng.choice(["delete", "insert", "replace", "swap", "repeat", "truncate"]):
            case "delete":
                del ids[at : at + rng.choice([1, 1, 2, 9])]
            case "insert":
                ids.insert(at, random_token(rng, vocab))
            case "replace":
                ids[at : at + 1] = [random_token(rng, vocab)]
            case "swap":
                ids[at : at + 2] = ids[at : at + 2][::-1]
            case "repeat":
                ids[at:at] = ids[at : at + rng.randint(1, 50)]
            case "truncate":
                del ids[at:]
    return ids


def restyled(rng: random.Random, text: str) -> str:
    """The same answer in another spelling that is read as well: bare coordinates, points as pairs, white space."""
    if rng.random() < 0.15:
        text = re.sub(r'"(<\|coord_\d+\|>)"', r"\1", text)
    if rng.random() < 0.15:
        text = re.sub(r'("?<\|coord_\d+\|>"?), ("?<\|coord_\d+\|>"?)', r"[\1, \2]", text)
    if rng.random() < 0.1:
        text = text.replace(", ", rng.choice([",", ",\n  ", " , "])).replace(": ", rng.choice([":", " :\t"]))
    return text


def edited_text(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randint(0, len(text))
        end = at + rng.choice([0, 0, 1, 2, 5])
        text = text[:at] + rng.choice([*SNIPPETS, ""]) + text[end:]
    return text if rng.random() < 0.5 else text + TURN_END + rng.choice(["", text])


def other_json(rng: random.Random) -> str:
    """Sound JSON that is no answer, or half of one."""
    keys = ["object_1", "object_2", "object_007", "note", "", "object_x", "object_3"]
    items = (f"{json.dumps(rng.choice(keys))}: {random_value(rng, 3)}" for _ in range(rng.randint(0, 5)))
    return "{" + rng.choice([", ", ",", " ,\n"]).join(items) + "}"


def random_value(rng: random.Random, depth: int) -> str:
    choice = rng.random()
    if depth == 0 or choice < 0.3:
        return rng.choice(["1", "-0.5e3", "null", "true", '"cat"', '"<|coord_3|>"', "<|coord_4|>", '""', "[]", "{}"])
    if choice < 0.5:
        return "[" + ", ".join(random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))) + "]"
    if choice < 0.75:
        return serialize_objects([random_object(rng)]).split(": ", 1)[1][:-1]
    keys = ["desc", "bbox_2d", "poly", "note", "object_3"]
    fields = (f'"{rng.choice(keys)}": {random_value(rng, depth - 1)}' for _ in range(rng.randint(0, 4)))
    return "{" + ", ".join(fields) + "}"


def run_chunk(seed: int, first: int, count: int) -> tuple[int, tuple[int, str] | None]:
    """Cases ``first`` … in a worker: how many were run, and the first failure as (case, traceback)."""
    for case in range(first, first + count):
        try:
            run_case(seed, case)
        except Exception:  # whatever a case raises is the finding; it is reported and ends the run
            return case - first + 1, (case, traceback.format_exc())
    return count, None


def chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, CHUNK):
        yield start, min(CHUNK, first + count - start)


def fuzz(seed: int, first: int, count: int, jobs: int) -> int:
    """Run ``count`` cases on ``jobs`` processes; prints progress. Returns the exit status."""
    for make in VOCABS:
        make()  # the Qwen tokenizer is converted and cached once, before workers need it
    started = said = time.monotonic()
    done = 0
    waiting = chunks(first, count)
    print(f"seed {seed}: {count:,} cases from {first:,} on {jobs} processes, tokenizers: "
          + ", ".join(make.__name__ for make in VOCABS), flush=True)  # fmt: skip
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: set[Future[tuple[int, tuple[int, str] | None]]] = set()
        while True:
            while len(running) < 2 * jobs and (part := next(waiting, None)) is not None:
                running.add(pool.submit(run_chunk, seed, *part))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                number, failure = future.result()
                done += number
                if failure is not None:
                    pool.shutdown(cancel_futures=True)
                    print(failure[1])
                    print(f"case {failure[0]} of seed {seed} failed; again with: "
                          f"python tests/fuzz/fuzz_targets.py --seed {seed} --case {failure[0]}")  # fmt: skip
                    return 1
            now = time.monotonic()
            if now - said >= SAY_EVERY_S:
                said = now
                rate = done / (now - started)
                print(f"{done:,} of {count:,}, {rate:,.0f} a second, eta {(count - done) / rate:,.0f} s", flush=True)
    print(f"{done:,} cases of seed {seed} hold every invariant ({time.monotonic() - started:,.0f} s)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--examples", type=int, default=1_000_000, help="cases to run [1000000]")
    flags.add_argument("--seed", type=int, default=0, help="another seed, other cases [0]")
    flags.add_argument("--first", type=int, default=0, help="the first case, to go on from where a run ended [0]")
    flags.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [all usable cores]")
    flags.add_argument("--case", type=int, default=None, help="run this case alone, here, with its traceback")
    options = flags.parse_args(argv)
    # By default a terminated parent leaves its workers waiting for ever; as an exit, it sends them home first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.case is not None:
        run_case(options.seed, options.case)
        print(f"case {options.case} of seed {options.seed} holds every invariant")
        return 0
    return fuzz(options.seed, options.first, options.examples, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
