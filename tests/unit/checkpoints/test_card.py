"""A checkpoint's card has everything besides its weights that its answers depend on, wherever the checkpoint goes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.checkpoints.card import CARD, UNTRAINED, Calibration, Card, Training, card_of_run, read_card, write_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.config import parse_config
from coordexp.data.files import asset
from coordexp.data.images import ResizeRule
from coordexp.data.preparation import ImagePreparation
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.errors import CheckpointError
from coordexp.evaluation.answers import ImageAnswer, read_answers
from coordexp.inference.completion import completion_config
from coordexp.inference.session import inference_config
from coordexp.modeling.inputs import build_messages
from support.cli_runs import Cli, small_checkpoint, write_run
from support.config_samples import edit_json, set_keys, stage2

TRAINED = Training(
    prompt="Find it.", system="You detect.", object_field_order="geometry_first", object_ordering="file",
    train_type="lora", dtype="bfloat16", global_max_length=3000, max_new_tokens=77,
    repeat_terminate={"enabled": True, "min_new_tokens": 5}, val_jsonl="val.jsonl",
)  # fmt: skip
FULL = Card(
    schema_version=1,
    training=TRAINED,
    preparation=ImagePreparation(ResizeRule(32, 1024, 35840), (5, 9)),
    classes=("kite", "ßé"),
    calibration=Calibration(2.0, 0.5, 30, 10, "d"),
)


@pytest.mark.parametrize("card", [FULL, UNTRAINED, replace(FULL, calibration=None, classes=())])
def test_a_card_reads_back_as_it_was_written(card: Card, tmp_path: Path) -> None:
    assert write_card(card, tmp_path) == tmp_path / CARD == tmp_path / "coordexp.json"
    assert read_card(tmp_path) == card


@pytest.mark.parametrize("key", ["schema_version", "training", "preparation", "classes", "calibration"])
def test_a_card_without_one_of_its_parts_is_refused(key: str, tmp_path: Path) -> None:
    content = json.loads(write_card(FULL, tmp_path).read_text())
    (tmp_path / CARD).write_text(json.dumps({name: value for name, value in content.items() if name != key}))
    with pytest.raises(CheckpointError, match=rf"coordexp\.json: cannot be read .*{key}"):
        read_card(tmp_path)


def test_a_card_of_bins_of_earlier_versions_is_refused(tmp_path: Path) -> None:
    edit_json(write_card(FULL, tmp_path), preparation__bin_rule="pixel_edges")  # as before there was only one
    assert read_card(tmp_path) == FULL
    edit_json(tmp_path / CARD, preparation__bin_rule="pixel_centres")
    with pytest.raises(CheckpointError, match=r"coordexp\.json: bin_rule is 'pixel_centres'.*train again"):
        read_card(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2),
        ("training.max_new_tokens", "77"),
        ("training.train_type", "qlora"),
        ("preparation.resize.factor", 0),
        ("preparation.seen_pixels", [1]),
        ("classes", "kite"),
        ("calibration.slope", -1.0),
    ],
)
def test_a_broken_card_is_one_clear_error(key: str, value: Any, tmp_path: Path) -> None:
    edit_json(write_card(FULL, tmp_path), **{key: value})
    with pytest.raises(CheckpointError, match=r"coordexp\.json: cannot be read"):
        read_card(tmp_path)


@pytest.mark.parametrize("name", ["image_preparation.json", "classes.json", "calibration.json", "resolved_config.yaml"])
def test_a_checkpoint_of_an_earlier_version_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert read_card(tmp_path) == UNTRAINED, "a folder without weights is not a checkpoint"
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=rf"has no coordexp\.json, but {name}"):
        read_card(tmp_path)
    write_card(FULL, tmp_path)
    assert read_card(tmp_path) == FULL


def test_the_card_of_a_run_has_its_settings() -> None:
    keys = {
        "template.prompt": "Find it.", "template.system": "You detect.", "model.dtype": "bfloat16",
        "custom.object_field_order": "geometry_first", "custom.object_ordering": "file",
        "custom.val_jsonl": "val.jsonl", "tuner.train_type": "lora", "global_max_length": 3000,
        "rollout_matching.max_new_tokens": 77,
        "rollout_matching.repeat_terminate": {"enabled": True, "min_new_tokens": 5},
    }  # fmt: skip
    card = card_of_run(parse_config(set_keys(stage2(), keys)), FULL.preparation, ("kite", "ßé"))
    assert card.training is not None
    guard = {"enabled": True, "min_new_tokens": 5, "max_consecutive_token_repeats": 64, "ngram_size": 64}
    assert card.training.repeat_terminate == guard | {"ngram_repeats": 2, "max_object_keys": None}
    assert card == replace(
        FULL, training=replace(TRAINED, repeat_terminate=card.training.repeat_terminate), calibration=None
    )


def test_an_empty_prompt_is_a_prompt() -> None:
    card = card_of_run(parse_config(set_keys(stage2(), {"template.prompt": ""})), FULL.preparation, ())
    assert card.training is not None and card.training.prompt == ""
    assert build_messages(Path("a.png"), "", None)[0]["content"][1] == {"type": "text", "text": ""}


def test_a_trained_checkpoint_names_the_hub_model_that_it_comes_from(tmp_path: Path) -> None:
    model = small_checkpoint(tmp_path / "model")
    write_card(replace(FULL, source="Qwen/tiny@0123abc"), model)
    config = parse_config(set_keys(stage2(), {"model.model": str(model)}))
    assert card_of_run(config, FULL.preparation, ()).source == "Qwen/tiny@0123abc"


def test_a_checkpoint_answers_by_its_card(tmp_path: Path) -> None:
    model = small_checkpoint(tmp_path / "model")
    write_card(FULL, model)
    config = inference_config(model)
    assert (config.template.prompt, config.template.system) == ("Find it.", "You detect.")
    assert (config.model.dtype, config.global_max_length) == ("bfloat16", 3000)
    assert config.rollout_matching.max_new_tokens == 77
    guard = config.rollout_matching.repeat_terminate
    assert (guard.enabled, guard.min_new_tokens) == (True, 5)
    assert completion_config(model, config=None, prompt=None, batch_size=None) == config


def test_answers_of_a_checkpoint_that_no_run_trained_come_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_checkpoint(tmp_path / "model")
    assert read_card(model) == UNTRAINED
    (model / CARD).unlink()
    with caplog.at_level(logging.WARNING):
        inference_config(model)
    assert "no run of CoordExp trained this checkpoint" in caplog.text and "it has no coordexp.json" in caplog.text


def test_expand_vocab_keeps_the_card(tmp_path: Path, cli: Cli) -> None:
    plain = small_checkpoint(tmp_path / "plain", coord_tokens=False)
    write_card(FULL, plain)
    assert cli("model", "expand-vocab", plain, tmp_path / "start").code == 0
    assert read_card(tmp_path / "start") == FULL


def test_a_run_its_merged_and_its_exported_model_give_the_same_answers(tmp_path: Path, cli: Cli) -> None:
    """The run has a prompt of its own: with another one its model finds nothing."""
    run = write_run(tmp_path, 1, asset("checkpoints/demo-stage1"), tuner__train_type="lora", tuner__lora_rank=2,
                    training__learning_rate=1e-3, rollout_matching__max_new_tokens=96)  # fmt: skip
    assert cli("train", run).code == 0
    trained, merged, exported = tmp_path / "out1", tmp_path / "merged", tmp_path / "exported"
    assert cli("model", "merge", trained, merged).code == 0
    assert cli("model", "export", trained, exported).code == 0
    cards = [read_card(folder) for folder in (trained, trained / "checkpoint-1", merged, exported)]
    assert cards[0].training is not None and cards[0].training.prompt == "Detect every object."
    assert len({str(replace(card, base=None)) for card in cards}) == 1 and cards[0].classes
    assert cards[0].base == cards[1].base == fingerprint(asset("checkpoints/demo-stage1"))
    assert cards[2].base is cards[3].base is None
    scenes = write_scenes(tmp_path / "scenes", 3, SPECS["sparse"], 5)

    def answers(model: Path) -> list[ImageAnswer]:
        out = tmp_path / f"of {model.name}"
        assert cli("predict", scenes, "--model", model, "--out", out).code == 0
        return read_answers(out)

    # The weights of the demo's checkpoint are bfloat16, and the run's float32.
    found = [answers(model) for model in (trained, merged, exported)]
    texts = [[answer.text for answer in answered] for answered in found]
    assert texts[0] == texts[1] == texts[2] and any("bbox_2d" in text for text in texts[0])
    sure = [[one.confidence for answer in answered for one in answer.pred] for answered in found]
    assert sure[1] == pytest.approx(sure[0], abs=1e-5) and sure[2] == pytest.approx(sure[0], abs=1e-5)
