"""``coordexp model tiny``; ``merge`` and ``info``, from a real LoRA run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.checkpoints.card import read_card, write_card
from coordexp.data.preparation import ImagePreparation, ResizeRule
from support.cli_runs import Cli, files_of_at_most, small_checkpoint, write_run

LORA = {"tuner__train_type": "lora", "tuner__lora_rank": 4, "tuner__lora_alpha": 8, "tuner__use_dora": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """output_dir of a LoRA run trained with the command; its base model is next to it."""
    folder = tmp_path_factory.mktemp("run")
    yaml = write_run(folder, 1, small_checkpoint(folder / "base"), **LORA)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from coordexp.cli import main

        with pytest.raises(SystemExit) as exit_:
            main(["train", str(yaml)])
    assert not exit_.value.code
    return folder / "out1"


def test_a_tiny_model_is_written_once(tmp_path: Path, cli: Cli) -> None:
    outcome = cli("model", "tiny", tmp_path / "tiny")
    assert outcome.code == 0 and f"wrote {tmp_path / 'tiny'}" in outcome.out
    weights = tmp_path / "tiny" / "model.safetensors"
    before, written_at = sorted(weights.parent.iterdir()), weights.stat().st_mtime_ns
    again = cli("model", "tiny", tmp_path / "tiny")
    assert again.code == 2 and "not empty" in again.err
    assert (sorted(weights.parent.iterdir()), weights.stat().st_mtime_ns) == (before, written_at)


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("size", [5_000, 100_000], ids=["config.json fits", "weights do not"])
def test_what_a_full_disk_ended_leaves_nothing_and_can_be_repeated(
    was_there: bool, size: int, tmp_path: Path, cli: Cli, model: Path
) -> None:
    out = tmp_path / "out"
    if was_there:
        out.mkdir()
    with files_of_at_most(size):
        full = cli("model", "export", model, out)
    assert (full.code, f"error: {out}: File too large" in full.err) == (2, True)
    assert list(out.iterdir()) == [] if was_there else not out.exists()
    assert cli("model", "export", model, out).code == 0


def test_an_export_that_is_refused_after_writing_leaves_nothing(tmp_path: Path, cli: Cli, model: Path) -> None:
    resized = shutil.copytree(model, tmp_path / "resized")
    rule = ResizeRule(factor=28, min_pixels=784, max_pixels=784)
    write_card(replace(read_card(resized), preparation=ImagePreparation(resize=rule)), resized)
    refused = cli("model", "export", resized, tmp_path / "out", "--for", "openai")
    assert (refused.code, "sides are multiples of 28" in refused.err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("system", "line"), [("You see cells.", "its system message: You see cells.\n"), (None, "")])
def test_an_export_for_a_server_prints_the_whole_prompt(
    system: str | None, line: str, run: Path, tmp_path: Path, cli: Cli
) -> None:
    card = read_card(run)
    assert card.training is not None
    write_card(replace(card, training=replace(card.training, prompt="Find cells.", system=system)), run)
    done = cli("model", "export", run, tmp_path / "out", "--for", "openai")
    write_card(card, run)
    assert done.out == f"wrote {tmp_path / 'out'}\nthe text of a request, after its image: Find cells.\n{line}"


def test_transformers_loads_a_merged_model(run: Path, tmp_path: Path, cli: Cli) -> None:
    outcome = cli("model", "merge", run, tmp_path / "merged")
    assert outcome.code == 0 and f"wrote {tmp_path / 'merged'}" in outcome.out
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert not [name for name, _ in model.named_parameters() if "lora" in name or "offset" in name]
    AutoProcessor.from_pretrained(tmp_path / "merged")
    info = json.loads(cli("model", "info", tmp_path / "merged", "--json").out)
    assert info["adapter"] is None and info["coord_tokens"] == "yes"
    assert sum(info["parameters"].values()) == sum(p.numel() for p in model.parameters())


def test_merge_into_another_number_type_from_a_moved_base(run: Path, tmp_path: Path, cli: Cli) -> None:
    moved = (run.parent / "base").rename(tmp_path / "moved")
    try:
        refused = cli("model", "merge", run, tmp_path / "out")
        assert refused.code == 2 and "--base MODEL" in refused.err and not (tmp_path / "out").exists()
        done = cli("model", "merge", run, tmp_path / "out", "--base", moved, "--dtype", "bfloat16")
    finally:
        moved.rename(run.parent / "base")
    assert done.code == 0
    assert json.loads(cli("model", "info", tmp_path / "out", "--json").out)["dtype"] == "bfloat16"


def test_a_model_without_adapters_is_not_merged(run: Path, tmp_path: Path, cli: Cli) -> None:
    outcome = cli("model", "merge", run.parent / "base", tmp_path / "out")
    assert outcome.code == 2 and "no adapters to merge" in outcome.err and "Traceback" not in outcome.err


def test_info_of_a_lora_run(run: Path, cli: Cli) -> None:
    shown = cli("model", "info", run)
    assert shown.code == 0
    assert "DoRA of rank 4, alpha 8, coordinate rows" in shown.out and str(run.parent / "base") in shown.out
    assert "q_proj" in shown.out and "linear_fc1" in shown.out, "valid names for tuner.target_modules"
    info = json.loads(cli("model", "info", run, "--json").out)
    adapter = info["adapter"]
    assert (adapter["rank"], adapter["alpha"], adapter["dora"], adapter["coordinate_rows"]) == (4, 8, True, True)
    assert adapter["parameters"] > 1000 * info["hidden"], "the coordinate rows and the adapters"
    assert info["parameters"].keys() == {"vit", "aligner", "llm"}


def test_info_names_missing_parts_of_a_model(tmp_path: Path, cli: Cli) -> None:
    small_checkpoint(tmp_path / "plain", coord_tokens=False)
    shown = cli("model", "info", tmp_path / "plain")
    assert shown.code == 0 and "coord tokens     yes" not in shown.out
    assert "expand-vocab" in shown.out, shown.out
