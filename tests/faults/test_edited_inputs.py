"""A change anywhere in a run's data or weights is refused when it resumes, with both fingerprints."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.config import RunConfig, resolved_yaml
from coordexp.errors import ConfigError
from coordexp.runs.start import checked_changes, newest_checkpoint
from support.cli_runs import run_cli
from support.tiny_run import run_config, tiny_checkpoint, tiny_scenes, train

FRACTIONS = (0.25, 0.5, 0.75)


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run of one step on data and weights that a test may edit; the data has 3 MB, most of it a note."""
    folder = tmp_path / "scenes"
    shutil.copytree(tiny_scenes().parent, folder)
    note = '{"metadata": {"note": "' + "7" * 260_000 + '"}, '
    text = (folder / "scenes.jsonl").read_text().splitlines()
    (folder / "scenes.jsonl").write_text("\n".join(line.replace("{", note, 1) for line in text) + "\n")
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    keys = {"training__max_steps": 1, "training__save_strategy": "steps", "training__save_steps": 1}
    keys |= {"custom__train_jsonl": str(folder / "scenes.jsonl"), "model__model": str(tmp_path / "model")}
    train(run_config(tmp_path, 1, **keys))
    return run_config(tmp_path, 1, **keys | {"training__max_steps": 2, "training__resume_from_checkpoint": True})


def edit(file: Path, fraction: float) -> None:
    """Change one byte; size and modification time stay."""
    content, times = bytearray(file.read_bytes()), file.stat()
    place = int(fraction * len(content))
    content[content.index(b"7", place) if file.suffix == ".jsonl" else place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_one_digit_in_the_middle_of_data_or_weights_is_refused(run: RunConfig, seen: Callable[[object], None]) -> None:
    """At a quarter, the half and three quarters of each; unchanged, the run may resume."""
    checked_changes(run, newest_checkpoint(run))
    said: re.Match[str] | None = None
    data, model = Path(run.custom.train_jsonl[0].path), Path(run.model.model)
    for key, named, file in (
        ("custom.train_jsonl", data, data),
        ("model.model", model, model / "processor_config.json"),
        ("model.model", model, model / "model.safetensors"),
    ):
        whole, was = file.read_bytes(), fingerprint(named)
        for fraction in FRACTIONS:
            edit(file, fraction)
            now = fingerprint(named)
            with pytest.raises(ConfigError) as refused:
                checked_changes(run, newest_checkpoint(run))
            said = re.search(
                rf"  {key}: .*\({was}\) in the checkpoint, .*\({now}: other content\) now", str(refused.value)
            )
            assert was != now and said is not None, refused.value
            file.write_bytes(whole)
    assert said is not None
    seen(said[0].strip())


def test_a_whole_fingerprint_is_fast(tmp_path: Path, seen: Callable[[object], None]) -> None:
    file = tmp_path / "big.jsonl"
    file.write_bytes(b"0123456789abcdef" * (128 << 16))  # 128 MiB
    fastest = float("inf")
    for attempt in range(3):
        with file.open("ab") as opened:
            opened.write(b"\n" * attempt)  # another file each time, because a fingerprint is kept
        begun = time.perf_counter()
        fingerprint(file)
        fastest = min(fastest, time.perf_counter() - begun)
    rate = file.stat().st_size / fastest / 1e6
    assert rate > 100
    seen(f"{rate:.0f} MB/s")


def test_adapters_are_refused_on_a_base_that_was_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    """Wherever they are loaded, with both fingerprints. ``model merge --base`` takes the edited model, with a
    warning."""
    base, out = tmp_path / "model", tmp_path / "run" / "checkpoint-1"
    shutil.copytree(tiny_checkpoint(), base)
    keys = {"training__max_steps": 1, "training__save_strategy": "steps", "training__save_steps": 1}
    keys |= {"model__model": str(base)}
    train(run_config(tmp_path, 1, **keys, tuner__train_type="lora", tuner__lora_rank=4, tuner__lora_alpha=8))
    was, image = fingerprint(base), next(tiny_scenes().parent.rglob("*.png"))
    answer = ("predict", image, "--model", out, "--out", tmp_path / "answers", "--max-new-tokens", 4)
    assert run_cli(capsys, *answer).code == 0
    edit(base / "model.safetensors", 0.5)
    again = run_config(tmp_path, 1, "again", **keys | {"model__model": str(out)})
    (tmp_path / "again.yaml").write_text(resolved_yaml(again))
    for words in (
        (*answer, "--overwrite"),
        ("evaluate", "--model", out, "--data", tiny_scenes(), "--out", tmp_path / "evaluation"),
        ("model", "merge", out, tmp_path / "merged"),
        ("model", "export", out, tmp_path / "exported"),
        ("train", tmp_path / "again.yaml"),
    ):
        refused = run_cli(capsys, *words)
        assert refused.code == 2 and was in refused.err and fingerprint(base) in refused.err, (words, refused.err)
        assert "--base" in refused.err and refused.err.count("\n") == 1
    merged = run_cli(capsys, "model", "merge", out, tmp_path / "merged", "--base", base)
    assert merged.code == 0
    seen(refused.err)
