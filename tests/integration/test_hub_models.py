"""Models of the hub by name, in processes of their own, from a hub on this machine (:mod:`support.hub`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordexp.checkpoints.card import read_card
from coordexp.config.source import read_document
from support.cli_runs import small_checkpoint, write_run
from support.hub import COMMIT, OLDER, HubOnDisk, serving

FETCHED = [
    "chat_template.jinja", "config.json", "coordexp.json", "generation_config.json", "model.safetensors",
    "processor_config.json", "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip
NAME, PINNED = "Qwen/tiny", f"Qwen/tiny@{COMMIT}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint among files that must not be fetched: pickles, code, and another checkpoint in a folder."""
    folder = small_checkpoint(tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a model runs')")
    (folder / "checkpoint-1").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "checkpoint-1" / "model.safetensors")
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[HubOnDisk]:
    with serving(HubOnDisk({NAME: model})) as hub:
        yield hub


def coordexp(hub: HubOnDisk, folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``coordexp WORDS`` in ``folder``, with the hub's cache below it."""
    return python(hub, folder, "-m", "coordexp", *words, **environment)


def python(hub: HubOnDisk, folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **hub.environment(folder / "home"), **environment}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def ended_well(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_training_by_name_records_the_commit_and_predicts_by_name(hub: HubOnDisk, tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, Path(NAME))
    log = ended_well(coordexp(hub, tmp_path, "train", config))
    assert hub.fetched == FETCHED
    assert log.count(f"model: {PINNED}, fetching") == 1 and "Fetching" in log and "100%" in log, "the library's bars"
    run = tmp_path / "out1"
    assert read_card(run).source == PINNED
    assert json.loads((run / "run_manifest.json").read_text())["model_source"] == PINNED
    recorded = str(read_document(run / "resolved_config.yaml").data["model"]["model"])
    assert recorded.endswith(f"models--Qwen--tiny/snapshots/{COMMIT}")

    hub.requests.clear()
    shown = coordexp(hub, tmp_path, "predict", "scenes.jsonl", "--model", NAME, "--limit", "1", "--max-new-tokens", "4")
    log = ended_well(shown)
    assert "1 images answered" in shown.stdout and f"model: {PINNED}, in " in log
    assert hub.fetched == [], "everything is in the cache"
    evaluated = coordexp(hub, tmp_path, "evaluate", "--model", NAME, "--data", "scenes.jsonl", "--limit", "1",
                         "rollout_matching.max_new_tokens=4", HF_HUB_OFFLINE="1")  # fmt: skip
    ended_well(evaluated)
    assert (tmp_path / "outputs" / "evaluation" / f"tiny-{COMMIT[:8]}" / "metrics.json").is_file()
    refused = coordexp(hub, tmp_path, "evaluate", "--model", NAME, "--data", "scenes.jsonl", "--calibrate")
    assert refused.returncode == 2 and f"coordexp model export {PINNED} FOLDER" in refused.stderr
    # On a machine without this cache, the recorded configuration means the same commit, not the newest.
    shutil.rmtree(tmp_path / "home")
    hub.commits |= {"main": OLDER, "before": COMMIT}
    found = said_of(hub, tmp_path, recorded, HF_HOME=str(tmp_path / "other"))[recorded]
    assert found.startswith(f"OK {tmp_path / 'other'}") and found.endswith(f"/snapshots/{COMMIT}")


def test_init_writes_the_commit_and_expand_vocab_keeps_it_on_the_card(
    hub: HubOnDisk, tmp_path: Path, model: Path
) -> None:
    write_run(tmp_path, 1, Path(NAME))
    ended_well(coordexp(hub, tmp_path, "init", "scenes.jsonl", "--model", f"{NAME}@v1", "--cpu", "--overwrite"))
    assert read_document(tmp_path / "stage1.yaml").data["model"]["model"] == f"{NAME}@{OLDER}"
    plain = small_checkpoint(tmp_path / "plain", coord_tokens=False)
    hub.models = {"Qwen/plain": plain}
    ended_well(coordexp(hub, tmp_path, "model", "expand-vocab", "Qwen/plain", "start"))
    assert read_card(tmp_path / "start").source == f"Qwen/plain@{COMMIT}"
    shown = coordexp(hub, tmp_path, "model", "info", "start")
    assert f"source           Qwen/plain@{COMMIT}" in shown.stdout


EACH = """
import sys
from coordexp.checkpoints.fetch import model_folder
from coordexp.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        print(name, "OK", model_folder(name))
    except CheckpointError as error:
        print(name, "ERROR", str(error).replace("\\n", "NEWLINE"))
"""


def said_of(hub: HubOnDisk, folder: Path, *names: str, **environment: str) -> dict[str, str]:
    """The message about each name, in one process."""
    process = python(hub, folder, "-c", EACH, *names, **environment)
    ended_well(process)
    lines = process.stdout.splitlines()
    assert len(lines) == len(names)
    return {name: line.removeprefix(f"{name} ") for name, line in zip(names, lines, strict=True)}


def test_what_cannot_be_fetched_is_one_line_before_weights_are_fetched(
    hub: HubOnDisk, tmp_path: Path, model: Path
) -> None:
    pickled, other = tmp_path / "pickled", tmp_path / "other"
    shutil.copytree(model, pickled)
    (pickled / "model.safetensors").unlink()
    shutil.copytree(model, other)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    hub.models = {NAME: model, "Qwen/pickled": pickled, "Qwen/moe": other, "Qwen/gated": model}
    hub.gated = frozenset({"Qwen/gated"})
    (tmp_path / "Qwen" / "local").mkdir(parents=True)
    said = said_of(hub, tmp_path, "org/tiyn", f"{NAME}@v9", "Qwen/gated@main", "Qwen/pickled@main", "Qwen/moe@main",
                     "Qwen/local", "Qwen/lokal")  # fmt: skip
    assert "has no model org/tiyn" in said["org/tiyn"] and "hf auth login" in said["org/tiyn"]
    assert "no revision v9" in said[f"{NAME}@v9"] and f"{hub.url}/{NAME}/commits/main" in said[f"{NAME}@v9"]
    assert "is gated; accept its terms on" in said["Qwen/gated@main"]
    assert "has no *.safetensors" in said["Qwen/pickled@main"] and "can run code" in said["Qwen/pickled@main"]
    assert "model type 'qwen3_vl_moe'" in said["Qwen/moe@main"]
    assert said["Qwen/local"] == "OK Qwen/local", "a folder of this machine, whose errors are found where it is read"
    assert said["Qwen/lokal"] == "OK Qwen/lokal"
    assert "model.safetensors" not in hub.fetched and not any("NEWLINE" in line for line in said.values())


def test_without_a_hub_the_cache_is_used_and_else_the_fix_is_named(hub: HubOnDisk, tmp_path: Path) -> None:
    assert said_of(hub, tmp_path, NAME)[NAME].startswith("OK ")
    known = len(hub.requests)
    offline = said_of(hub, tmp_path, NAME, PINNED, f"{NAME}@v1", "Qwen/other", HF_HUB_OFFLINE="1")
    assert offline[NAME] == offline[PINNED] and offline[NAME].startswith("OK ")
    for name in (f"{NAME}@v1", "Qwen/other"):
        assert "HF_HUB_OFFLINE is set; unset it" in offline[name] and "hf download" in offline[name]
    assert len(hub.requests) == known
    process = python(hub, tmp_path, "-c", EACH, NAME, PINNED, "Qwen/other", HF_ENDPOINT="http://127.0.0.1:9")
    reached = process.stdout.splitlines()
    assert [line.split()[1] for line in reached] == ["OK", "OK", "ERROR"]
    assert "http://127.0.0.1:9 is not reached" in reached[2] and "HTTPS_PROXY" in reached[2]
    assert f"taking {PINNED}, as it was fetched last" in process.stderr, "not silently"
    (tmp_path / "file").write_text("")
    unwritable = said_of(hub, tmp_path, NAME, HF_HUB_CACHE=str(tmp_path / "file" / "cache"))[NAME]
    assert "file/cache" in unwritable and "set HF_HOME" in unwritable


def test_a_hub_that_does_not_answer_is_given_up(hub: HubOnDisk, tmp_path: Path) -> None:
    hub.silent, began = True, time.monotonic()
    assert "is not reached (timed out)" in said_of(hub, tmp_path, NAME, HF_HUB_ETAG_TIMEOUT="1")[NAME]
    assert time.monotonic() - began < 30


def test_a_fetch_that_was_killed_is_finished_by_the_next(hub: HubOnDisk, tmp_path: Path, model: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(model, large)
    hub.models, hub.slow = {NAME: large}, 0.2
    env = {**os.environ, **hub.environment(tmp_path / "home")}
    with (large / "model-extra.safetensors").open("wb") as file:
        file.write(b"x" * (4 << 20))
    began = subprocess.Popen([sys.executable, "-c", EACH, NAME], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 60
    while "model-extra.safetensors" not in hub.fetched and time.monotonic() < deadline:
        time.sleep(0.05)
    began.send_signal(signal.SIGKILL)
    began.wait()
    hub.slow = 0.0
    assert "not whole in" in said_of(hub, tmp_path, PINNED, HF_HUB_OFFLINE="1")[PINNED]
    line = said_of(hub, tmp_path, NAME)[NAME]
    assert line.startswith("OK ")
    assert (Path(line.removeprefix("OK ")) / "model-extra.safetensors").stat().st_size == 4 << 20


def test_a_file_that_was_cut_off_is_named_and_fetched_after_it_was_deleted(
    hub: HubOnDisk, tmp_path: Path, model: Path
) -> None:
    folder = Path(said_of(hub, tmp_path, NAME)[NAME].removeprefix("OK "))
    weights, size = (folder / "model.safetensors").resolve(), (model / "model.safetensors").stat().st_size
    with weights.open("r+b") as file:
        file.truncate(1000)
    said = said_of(hub, tmp_path, NAME)[NAME]
    assert f"model.safetensors has 1000 bytes, not {size}" in said and f"delete {weights}" in said
    weights.unlink()
    assert said_of(hub, tmp_path, NAME)[NAME] == f"OK {folder}" and weights.stat().st_size == size


def test_adapters_find_their_base_on_the_hub(hub: HubOnDisk, tmp_path: Path) -> None:
    """They name it as the snapshot in another machine's cache, or as a model of the hub."""
    places = {"there": f"/elsewhere/hub/models--Qwen--tiny/snapshots/{COMMIT}", "named": NAME, "lost": "/elsewhere/x"}
    for name, base in places.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    code = (
        "from coordexp.checkpoints.fetch import model_folder; from coordexp.checkpoints.folder import Checkpoint\n"
        "for name in ('there', 'named'): print(Checkpoint.open(model_folder(name)).base.name)\n"
        "try: Checkpoint.open(model_folder('lost'))\n"
        "except Exception as error: print(error)"
    )
    process = python(hub, tmp_path, "-c", code)
    ended_well(process)
    there, named, lost = process.stdout.splitlines()
    assert (there, named) == (COMMIT, COMMIT) and "/elsewhere/x" in lost and "not a folder here" in lost
    assert hub.fetched == FETCHED, "once"


def test_one_process_of_two_fetches(hub: HubOnDisk, tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, Path(NAME), training__per_device_train_batch_size=1)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "coordexp", "train")
    log = ended_well(python(hub, tmp_path, *words, config))
    assert hub.fetched == FETCHED, "each file once"
    assert log.count(f"model: {PINNED}, fetching") == 1
    assert read_card(tmp_path / "out1").source == PINNED
    refused = python(hub, tmp_path, *words, config, "model.model=Qwen/missing", "training.output_dir=other")
    assert refused.returncode != 0 and "has no model Qwen/missing" in refused.stderr


@pytest.mark.parametrize("status", [200, 429])
def test_a_page_of_something_else_than_a_hub_is_no_hub(hub: HubOnDisk, tmp_path: Path, status: int) -> None:
    """A network that asks to log in answers with status 200; a proxy limits requests of all its users."""
    page = (status, b"<html>Log in to this network</html>")
    hub.page = page
    refused = coordexp(hub, tmp_path, "model", "info", NAME)
    assert refused.returncode == 2 and f"{hub.url} is not reached" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    hub.page = None
    ended_well(coordexp(hub, tmp_path, "model", "info", NAME))
    hub.page = page
    assert f"taking {PINNED}, as it was fetched last" in ended_well(coordexp(hub, tmp_path, "model", "info", NAME))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HTTP_PROXY": "ftp://localhost:1", "NO_PROXY": ""}, "Unknown scheme for proxy URL"),
        ({"HF_TOKEN": "hf_\u043a"}, "HF_TOKEN is not ASCII"),
        ({"SSL_CERT_FILE": "/missing.pem"}, "certificates of SSL_CERT_FILE"),
    ],
)
def test_settings_with_which_no_request_can_be_made_are_named(
    hub: HubOnDisk, tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    refused = coordexp(hub, tmp_path, "model", "info", NAME, **environment)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert "is not reached" in refused.stderr and reason in " ".join(refused.stderr.split())
    assert "set HF_HOME" not in refused.stderr


def test_an_endpoint_that_is_no_address_is_named(hub: HubOnDisk, tmp_path: Path) -> None:
    refused = coordexp(hub, tmp_path, "model", "info", NAME, HF_ENDPOINT="http://[::1")
    assert refused.returncode == 2 and "HF_ENDPOINT=http://[::1: Invalid IPv6 URL; correct it" in refused.stderr
