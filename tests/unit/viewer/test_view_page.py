"""The viewer page: collected records, and data that cannot run as script."""

from __future__ import annotations

import io
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import PREDICTIONS, ScoredObject, write_answers
from coordexp.viewer.collect import BEHIND_CUT, collect, compare, find_checkpoint
from coordexp.viewer.render import as_script_data, render
from coordexp.viewer.serve import make_server
from support.answers import tiny_vocab
from support.cli_runs import Cli
from support.scored_answers import random_answers
from support.view_runs import write_run


def data_of(page: str, name: str) -> Any:
    return json.loads(re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', page, re.S)[1])


def test_records_have_matches_roles_losses_and_curves(tmp_path: Path) -> None:
    vocab = tiny_vocab()
    data = collect(write_run(tmp_path), vocab)
    assert [(r.sample_id, r.step, r.loss) for r in data.records] == [("sample 0", 1, 0.5), ("sample 1", 2, 1.5)]
    first = data.records[0]
    assert [o.partner for o in first.gt] == [0, None] and [o.partner for o in first.pred] == [0]
    assert first.pred[0].iou == 1.0 and first.dropped == {"missing_geometry": 1}
    assert first.target is not None and first.rollout is not None
    assert "".join(first.target.pieces).startswith('{"object_1"')
    assert sum(count for _, count in first.target.roles) == len(first.target.pieces)
    assert sum(count for _, count in first.rollout.roles) == len(first.rollout.pieces)
    assert {role for role, _ in first.rollout.roles} >= {"MATCHED_COORD", BEHIND_CUT}
    forced = {first + k for first, count in first.rollout.forced for k in range(count)}
    decided = "".join(piece for at, piece in enumerate(first.rollout.pieces) if at not in forced)
    assert decided.count("<|coord_") == 4 and "black cat" in decided and "object_1" not in decided
    assert set(first.loss_by_role or {}) == {"MATCHED_COORD", "GT_STRUCT", "GT_COORD"}
    assert data.curves == {"loss": [(1, 1.0), (2, 0.0)]}


def test_curves_of_a_finished_run_that_goes_on_are_of_its_newest_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path)  # its trainer_state.json ends at step 2
    for last in (1, 9, 10):
        state = tmp_path / f"checkpoint-{last}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": [{"step": k, "loss": float(k)} for k in (1, last)]}))
    assert collect(tmp_path).curves == {"loss": [(1, 1.0), (10, 10.0)]}


def test_without_a_tokenizer_only_tokens_are_missing(tmp_path: Path) -> None:
    data = collect(write_run(tmp_path))
    assert data.records[0].rollout is None and any("--model" in note for note in data.notes)
    assert '"object_1"' in data.records[0].text


@pytest.mark.parametrize("place", ["", "evaluation"])
def test_predictions_are_matched_again(tmp_path: Path, place: str) -> None:
    write_answers(random_answers(5, 1), tmp_path / place / "predictions.jsonl")
    data = collect(tmp_path)
    for shown, one in zip(data.records, random_answers(5, 1), strict=True):
        assert [o.bins for o in shown.gt] == [o.bins for o in one.truth]
        for i, found in enumerate(shown.pred):
            assert found.partner is None or (shown.gt[found.partner].partner == i and (found.iou or 0) >= 0.5)


def test_too_many_records_are_thinned_evenly_and_reported(tmp_path: Path) -> None:
    write_answers(random_answers(10, 1), tmp_path / "predictions.jsonl")
    data = collect(tmp_path, max_records=4)
    assert [r.sample_id for r in data.records] == ["s0", "s2", "s5", "s7"]
    assert data.notes == ("10 records; shown are 4, evenly over all of them (--max-records)",)


def test_a_run_without_answers_names_the_fix(tmp_path: Path) -> None:
    history = [{"step": k, "loss": 2.0 - k} for k in (1, 2)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "resolved_config.yaml").write_text("{}")
    (note,) = collect(tmp_path).notes
    assert f"coordexp evaluate {tmp_path}/resolved_config.yaml --model {tmp_path}; " in note


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to show"):
        collect(tmp_path)


@pytest.mark.parametrize("log", ["[1, 2]", '"text"', '{"log_history": 3}', '{"log_history": [[]]}'])
def test_a_log_of_another_form_is_named(log: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(log)
    with pytest.raises(DataError, match=r"trainer_state\.json: is not a run's log"):
        collect(tmp_path)


def test_infinite_figures_are_left_out_of_curves(tmp_path: Path) -> None:
    lines = [{"step": k, "loss": float(k), "grad_norm": [float("inf"), 2.0, 3.0][k]} for k in range(3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    curves = data_of(render(collect(tmp_path)), "data")["curves"]
    assert curves == {"loss": [[0, 0.0], [1, 1.0], [2, 2.0]], "grad_norm": [[1, 2.0], [2, 3.0]]}


@pytest.mark.parametrize("text", ["</script>", "<!--", "<script", "&amp;", "]]>", "{{ title }}"])
def test_script_data_is_inert_and_round_trips(text: str) -> None:
    written = as_script_data({"a": text})
    assert not set("<>&") & set(written)
    assert json.loads(written) == {"a": text}


def answered(folder: Path, image: Image.Image, count: int = 1) -> None:
    """So many answers for the one image."""
    image.save(folder / "a.png")
    write_answers([replace(a, image=str(folder / "a.png")) for a in random_answers(count, 1)], folder / PREDICTIONS)


def test_each_image_is_embedded_once_and_small(tmp_path: Path) -> None:
    answered(tmp_path, Image.new("RGB", (2000, 1000), "red"), 3)
    images = data_of(render(collect(tmp_path), image_side=100), "images")
    assert len(images) == 1 and images[0]["src"].startswith("data:image/jpeg;base64,") and len(images[0]["src"]) < 5000


def test_the_page_has_no_external_links(tmp_path: Path) -> None:
    page = render(collect(write_run(tmp_path)))
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert {record["file"] for record in data_of(page, "data")["records"]} == {"a.png"}


@contextmanager
def served(source: Path, **options: Any) -> Iterator[httpx.Client]:
    with make_server([source], lambda: collect(source), **options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield client
        server.shutdown()


def test_the_page_is_served_with_the_original_images_only(tmp_path: Path) -> None:
    answered(tmp_path, Image.new("RGB", (900, 600), "red"), 2)
    with served(tmp_path, image_side=100) as client:
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8" and data_of(page.text, "data")["served"]
        assert Image.open(io.BytesIO(client.get("/image/0").content)).size == (900, 600)
        for path in ("/image/1", "/image/-1", "/etc/passwd", "/image/..%2fa.png"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/", "/version", "/image/0"])
def test_the_page_answers_to_its_own_address_only(path: str, tmp_path: Path) -> None:
    answered(tmp_path, Image.new("RGB", (90, 60), "red"))
    with served(tmp_path) as client:
        port = client.base_url.port
        for own in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert client.get(path, headers={"Host": own, "Origin": f"http://{own}"}).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
            assert client.get(path, headers={"Host": host}).status_code == 403
        forwarded = client.get(path, headers={"Host": "localhost:1"})  # from another port of the user's machine
        assert forwarded.status_code == 403 and f"ssh -L {port}:127.0.0.1:{port} HOST" in forwarded.text
        assert client.get(path, headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get(path, headers={"Origin": "null"}).status_code == 403


def test_clients_that_leave_at_once_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answered(tmp_path, Image.effect_noise((1500, 1500), 90))
    others = set(threading.enumerate())  # servers of other tests in this process
    with served(tmp_path) as client:
        host, port = client.base_url.host, client.base_url.port
        for request in (b"", b"GET /im", *[f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
                                          for path in ("/", "/image/0", "/nothing") * 3]):  # fmt: skip
            with socket.create_connection((host, port or 0)) as left:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
                left.sendall(request)
        deadline = time.monotonic() + 20
        while any("process_request_thread" in thread.name for thread in {*threading.enumerate()} - others):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.get("/version").status_code == 200
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_followed_run_shows_its_new_records(tmp_path: Path) -> None:
    write_answers(random_answers(2, 1), tmp_path / PREDICTIONS)
    (tmp_path / "moved.jsonl").symlink_to(tmp_path / "gone")
    with served(tmp_path, follow=True) as client:
        first = data_of(client.get("/").text, "data")
        assert client.get("/version").text == first["version"]
        write_answers(random_answers(3, 1), tmp_path / PREDICTIONS)
        assert client.get("/version").text != first["version"]
        assert len(data_of(client.get("/").text, "data")["records"]) == 3
        (tmp_path / "trainer_state.json").write_text("[1]")
        broken = client.get("/")
        assert broken.status_code == 503 and "trainer_state.json: is not a run's log" in broken.text
        assert broken.headers["refresh"] == "3", "the browser asks again"
        (tmp_path / "trainer_state.json").unlink()
        assert client.get("/").status_code == 200


def test_two_runs_are_joined_by_image(tmp_path: Path) -> None:
    of_other_size, *same = random_answers(7, 1)
    write_answers([of_other_size, *same[:4]], tmp_path / "a" / PREDICTIONS)
    write_answers([replace(of_other_size, width=7), *same], tmp_path / "b" / PREDICTIONS)
    both = compare(collect(tmp_path / "a"), collect(tmp_path / "b"))
    assert [record.sample_id for record in both.records] == ["s1", "s2", "s3", "s4"]
    assert all(record.other is not None and record.other.sample_id == record.sample_id for record in both.records)
    assert [note.split()[0] for note in both.notes] == ["1", "3"]  # left out of either run
    first, second = data_of(render(both), "data")["records"][0], both.records[0].other
    assert second is not None and len(first["other"]["pred"]) == len(second.pred)


def test_two_runs_have_names_of_their_own(tmp_path: Path) -> None:
    one, other = (collect(write_run(tmp_path / exp / "stage2" / "run")) for exp in ("x", "y"))
    both = compare(one, other)
    assert both.runs == ("stage2/run (first)", "stage2/run (second)")
    assert both.curves and both.notes[-1] == "the curves are those of stage2/run (first)"


def test_an_object_found_under_another_name_is_linked(tmp_path: Path) -> None:
    one = next(a for a in random_answers(20, 1) if a.truth)
    truth = one.truth[0]
    renamed = ScoredObject("something else", truth.kind, truth.bins, 0.5)
    write_answers([replace(one, gt=(truth,), pred=(renamed,))], tmp_path / PREDICTIONS)
    (record,) = collect(tmp_path).records
    assert record.pred[0].partner is None and record.pred[0].renamed == 0 and record.gt[0].renamed == 0


def test_the_command_writes_the_page(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "deep" / "page.html"
    outcome = cli("view", write_run(tmp_path / "run"), "--out", out)
    assert outcome.code == 0 and "2 records" in outcome.out and "note: no tokenizer" in outcome.out
    assert data_of(out.read_text(encoding="utf-8"), "data")["curves"]


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_an_unfinished_run_names_the_model_it_started_from(tmp_path: Path) -> None:
    model, run = checkpoint(tmp_path / "model"), tmp_path / "run"
    (run / "rollout_records").mkdir(parents=True)
    (run / "resolved_config.yaml").write_text(yaml.safe_dump({"model": {"model": str(model)}}), encoding="utf-8")
    (run / "run_manifest.json").write_text('{"seed": 1}', encoding="utf-8")
    assert find_checkpoint(run) == find_checkpoint(run / "rollout_records") == model


def test_a_finished_run_is_its_own_checkpoint(tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run")
    (run / "resolved_config.yaml").write_text("model: {model: elsewhere}", encoding="utf-8")
    assert find_checkpoint(run) == run


def test_a_broken_resolved_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "resolved_config.yaml").write_text("model: [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"resolved_config\.yaml"):
        find_checkpoint(tmp_path)
