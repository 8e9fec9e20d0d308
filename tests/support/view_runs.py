"""Runs to look at: a folder with every kind of thing that the viewer shows, and answers with hostile text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from PIL import Image

from coordexp.evaluation.answers import ImageAnswer
from coordexp.matching import MatchingConfig
from coordexp.recording.rollout_record import LossRecord, Settings, WhereInTraining, make_record
from coordexp.records import Segment, to_json
from coordexp.targets import TransportConfig
from support.answers import CAT, DOG, answer, entry, outcome_of, record, tiny_vocab
from support.scored_answers import random_answers

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> {{ data }} \u2028 &lt;'


def write_run(folder: Path, steps: int = 2) -> Path:
    """A run's folder with rollout records (one object found, one appended, one dropped), losses and curves."""
    settings = Settings(MatchingConfig(), TransportConfig(), "desc_first")
    records = folder / "rollout_records" / "rollouts_rank0.jsonl"
    records.parent.mkdir(parents=True)
    Image.new("RGB", (64, 48), "gray").save(folder / "a.png")
    vocab = tiny_vocab()
    lines, losses = b"", b""
    for step in range(steps):
        image = replace(record([CAT, DOG], f"sample {step}"), image=folder / "a.png", width=64, height=48)
        outcome = outcome_of(answer(entry(1), '"object_2": {"desc": "x"}'), [CAT, DOG], vocab)
        where = WhereInTraining(step, 0, 0, 0, 1)
        lines += to_json(make_record(image, outcome, where, settings)) + b"\n"
        segment = Segment(image.sample_id, (1,), outcome.target)
        supervised = [p for p, role in enumerate(outcome.target.roles_T) if role in (1, 2, 4)]
        loss = LossRecord.from_segment(segment, where, step, [(position, 0.5 + step) for position in supervised])
        losses += to_json(loss) + b"\n"
    records.write_bytes(lines)
    (records.parent / "losses_rank0.jsonl").write_bytes(losses)
    history = [{"step": k, "loss": 2.0 - k, "epoch": k} for k in (1, 2)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def hostile_answers(folder: Path) -> list[ImageAnswer]:
    one = random_answers(4, 2)[1]
    gt = tuple(replace(o, desc=HOSTILE) for o in one.truth)
    return [replace(one, sample_id=HOSTILE, image=str(folder / "gone.png"), gt=gt, text=HOSTILE,
                    pred=tuple(replace(o, desc=HOSTILE) for o in one.pred), dropped={HOSTILE: 1})]  # fmt: skip
