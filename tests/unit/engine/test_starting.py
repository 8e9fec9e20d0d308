"""Messages while a vLLM engine starts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.engine.wire.arguments import with_image_size
from coordexp.engine.wire.engine_process import engines_import_quickly
from coordexp.engine.wire.starting import DURATIONS, announced_start, engine_errors
from coordexp.errors import CheckpointError, RolloutError
from coordexp.out_of_memory import is_out_of_memory

CPU = {"model": "checkpoints/start", "dtype": "float32", "tensor_parallel_size": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COORDEXP_CACHE", str(tmp_path))
    return tmp_path


def lines_of_a_start(capsys: pytest.CaptureFixture[str], **keys: object) -> list[str]:
    with announced_start({**CPU, **keys}, gpu=False):
        assert "checkpoints/start" in capsys.readouterr().err, "before the engine is there"
    with announced_start({**CPU, **keys}, gpu=False):
        pass
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_a_second_start_has_an_eta_and_each_its_duration(capsys: pytest.CaptureFixture[str]) -> None:
    ready, begins, again = lines_of_a_start(capsys)
    assert " s" in ready and "ETA 0 s" in begins and " s" in again


def test_other_engines_have_durations_of_their_own(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    lines_of_a_start(capsys)
    with announced_start({**CPU, "tensor_parallel_size": 2}, gpu=False):
        assert "ETA" not in capsys.readouterr().err
    with announced_start(CPU, gpu=True):
        assert "ETA" not in capsys.readouterr().err
    (cache / DURATIONS).write_text("{", encoding="utf-8")  # an ETA must not end a run
    with announced_start(CPU, gpu=False):
        assert "ETA" not in capsys.readouterr().err


def test_a_duration_that_cannot_be_written_ends_no_run(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    (cache / DURATIONS / "taken").mkdir(parents=True)
    assert "ready" in lines_of_a_start(capsys)[-1]


def test_a_failed_start_has_no_duration(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    with pytest.raises(RuntimeError), announced_start(CPU, gpu=False):
        raise RuntimeError("no memory")
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (cache / DURATIONS).exists()


def test_an_engine_that_skips_forced_tokens_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of_a_start(capsys, speculative_config={})
    assert sum("rollout_matching.decoding.skip_forced_tokens: false" in line for line in lines) == 1


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with announced_start(CPU, gpu=False):
        pass
    assert capsys.readouterr().err == ""


def test_a_checkpoint_without_architectures_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    """vLLM would take it for a pooling model, and fail after a minute."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}', encoding="utf-8")
    arguments = {"model": str(tmp_path), "max_model_len": 512, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    with pytest.raises(CheckpointError, match="Qwen3VLForConditionalGeneration"):
        with_image_size(arguments)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ValueError("No common block size for 7"), "if nothing in rollout_matching.vllm is its cause"),
        (ValueError("Free memory on device is less than desired GPU memory utilization"), "lower .*utilization"),
        (ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"), "raise"),
        (ValueError("KV cache is needed. Try increasing `gpu_memory_utilization` or decreasing"), "raise .*max_model"),
    ],
)
def test_an_error_of_the_engine_is_one_of_ours(error: Exception, advice: str) -> None:
    pytest.importorskip("vllm")
    shown = rf"could not be started: ValueError: {error}; .*{advice}"
    with pytest.raises(RolloutError, match=shown) as caught, engine_errors("could not be started"):
        raise error
    assert is_out_of_memory(caught.value) == ("less than desired" in str(error))  # then "lower" is the cure


def test_an_engine_process_imports_without_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pickles its main function into a process that it spawns; there it is vLLM's own again."""
    pytest.importorskip("vllm")
    from vllm.v1.engine.core import EngineCoreProc

    monkeypatch.setattr(EngineCoreProc, "run_engine_core", EngineCoreProc.run_engine_core)  # put back afterwards
    engines_import_quickly()
    engines_import_quickly()
    code = (
        "import gc, pickle, sys\n"
        "main = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(main.__qualname__, *sorted({'sklearn', 'vllm'} & set(sys.modules)), gc.get_freeze_count() > 0)\n"
    )
    command = [sys.executable, "-c", code, pickle.dumps(EngineCoreProc.run_engine_core).hex()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "EngineCoreProc.run_engine_core vllm True"
