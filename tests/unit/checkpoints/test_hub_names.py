"""Whether a text is a folder of this machine or a model of the hub. Makes no connection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordexp import hub
from coordexp.checkpoints.card import read_card
from coordexp.config.checks import check_paths
from coordexp.errors import CheckpointError, ConfigError
from coordexp.hub import HubModel, hub_model, name_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", HubModel("Qwen/Qwen3-VL-2B-Instruct", None)),
        ("./Qwen/tiny", HubModel("Qwen/tiny", None)),
        ("Qwen/tiny@v1.0", HubModel("Qwen/tiny", "v1.0")),
        ("Qwen/tiny@refs/pr/1", HubModel("Qwen/tiny", "refs/pr/1")),
        (f"Qwen/tiny@{COMMIT}", HubModel("Qwen/tiny", COMMIT)),
        ("here/missing@main", HubModel("here/missing", "main")),
        (f"/elsewhere/hub/models--Qwen--tiny/snapshots/{COMMIT}", HubModel("Qwen/tiny", COMMIT)),
        ("here/missing", None),
        ("here/there", None),
        ("here/there@v1", None),
        ("tiny", None),
        ("/Qwen/tiny", None),
        ("../Qwen/tiny", None),
        ("Qwen/tiny/sub", None),
        ("Qwen/ti ny", None),
        ("Qwen/tiny@", None),
        ("Qwen/tiny@v1@v2", None),
        ("Qwen/-tiny", None),
        ("Qwen/a--b", None),
        (f"Qwen/{'a' * 91}", HubModel(f"Qwen/{'a' * 91}", None)),
        (f"Qwen/{'a' * 92}", None),
        ("/elsewhere/hub/models--Qwen--tiny/snapshots/main", None),
    ],
)
def test_a_folder_that_is_here_wins_and_its_neighbours_are_typing_mistakes(
    text: str, expected: HubModel | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here/there", "here/there@v1"):
        Path(folder).mkdir(parents=True)
    assert hub_model(text) == expected


def test_a_snapshot_is_named_by_model_and_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--tiny" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert name_of(folder) == f"Qwen/tiny@{COMMIT}"
    assert name_of(tmp_path) is None
    assert hub_model(folder) is None, "it is a folder of this machine"
    assert read_card(folder).source == f"Qwen/tiny@{COMMIT}"
    assert read_card(tmp_path).source is None


def test_a_typing_mistake_next_to_folders_is_answered_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    Path("file").write_text("")
    with pytest.raises(ConfigError) as raised:
        check_paths({"a": "checkpoints/strat", "b": "file", "c": "Qwen/tiny", "d": "start"})
    message = str(raised.value)
    assert "a: checkpoints/strat: no such folder in checkpoints" in message and "checkpoints/strat@main" in message
    assert "b: file: is a file" in message and "d: start: no such folder" in message
    assert "c: Qwen/tiny: no such folder here, so it means a model of the hub" in message, "said next to mistakes only"
    check_paths({"c": "Qwen/tiny"})
    with pytest.raises(ConfigError) as raised:
        check_paths({"a": "checkpoints/a--b", "b": "checkpoints/c.git"})
    assert "@main" not in str(raised.value), "names that the hub cannot have"


def test_a_name_too_long_to_look_up_is_refused() -> None:
    for name in (f"Qwen/tiny@{'r' * 5000}", f"{'x' * 300}/y", "x" * 5000):
        with pytest.raises(CheckpointError, match="File name too long"):
            hub_model(name)
        with pytest.raises(CheckpointError, match="File name too long"):
            check_paths({"model.model": name})


def test_a_folder_of_the_cache_needs_all_files_that_the_hub_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--Qwen--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    sizes = {"config.json": 2, "model.safetensors": 3, "sub/model.safetensors": 3, "model.bin": 9, "code.py": 9}
    listed = [huggingface_hub.RepoFile(path=name, size=size, oid="0" * 40) for name, size in sizes.items()]
    monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", lambda *_, **__: listed)
    named = HubModel("Qwen/tiny", COMMIT)
    (snapshot / "config.json").write_text(json.dumps({}))
    assert hub.cached(named) is None, "its fetch was interrupted"
    (snapshot / "model.safetensors").write_bytes(b"abc")
    assert hub.cached(named) == snapshot
