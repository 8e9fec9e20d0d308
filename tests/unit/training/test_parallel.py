"""``fsdp`` and ``deepspeed``: the settings passed to transformers, and those refused before loading."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from coordexp.checkpoints.run_folder import check_not_running, only_run_in
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.errors import ConfigError, MissingDependency
from coordexp.training.parallel import check_parallel, parallel_arguments, set_allocator
from support.tiny_run import run_config


def test_without_either_section_nothing_is_passed(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1)
    check_parallel(config, 1)
    check_parallel(config, 8)
    assert parallel_arguments(config) == {}


def test_fsdp_reaches_accelerate_as_version_2(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, fsdp__enabled=True)
    assert parallel_arguments(config) == {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "activation_checkpointing": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
    }


def test_fsdp_over_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.enabled: .*torchrun --nproc_per_node"):
        check_parallel(run_config(tmp_path, 1, fsdp__enabled=True), 1)
    check_parallel(run_config(tmp_path, 1, fsdp__enabled=True), 2)


def test_deepspeed_configuration_is_passed_unchanged(tmp_path: Path) -> None:
    stage = {"zero_optimization": {"stage": 2}}
    config = run_config(tmp_path, 1, deepspeed__enabled=True, deepspeed__config=stage, training__use_cpu=False)
    assert parallel_arguments(config) == {"deepspeed": stage}


@pytest.mark.parametrize(
    ("keys", "error", "complaint"),
    [
        ({"training__use_cpu": True}, ConfigError, r"deepspeed\.enabled: DeepSpeed trains on GPUs"),
        ({"deepspeed__config": "/nowhere/z.json"}, ConfigError, r"deepspeed\.config: /nowhere/z\.json: not readable"),
        (
            {"deepspeed__config": {"zero_optimization": {"stage": 3}}},
            ConfigError,
            r"zero_optimization\.stage 3 .*write stage 2, or use fsdp",
        ),
        (
            {"deepspeed__config": {"scheduler": {"type": "WarmupLR"}}, "training__vit_lr": 1e-6},
            ConfigError,
            r"deepspeed\.config: its scheduler .*training\.vit_lr",
        ),
        ({}, MissingDependency, r"deepspeed\.enabled: true needs the package 'deepspeed'.*pip install"),
    ],
    ids=["on a CPU", "no such file", "weights in parts", "one learning rate", "not installed"],
)
def test_unsupported_deepspeed_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    given = {"deepspeed__enabled": True, "deepspeed__config": {"train_batch_size": "auto"}, "training__use_cpu": False}
    with pytest.raises(error, match=complaint):
        check_parallel(run_config(tmp_path, 1, **(given | keys)), 2)


@pytest.mark.parametrize(
    ("rollouts", "users", "expected"),
    [
        ({"rollout_backend": "hf"}, None, "expandable_segments:True"),
        ({"rollout_backend": "hf"}, "backend:native", "backend:native"),
        ({"rollout_backend": "vllm", "vllm": {"mode": "colocate"}}, None, None),
    ],
)
def test_allocator_grows_segments_unless_an_engine_shares_the_process(
    rollouts: dict[str, Any], users: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", users or "")
    if users is None:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    set_allocator(RolloutMatchingConfig.model_validate(rollouts))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(*_: object) -> None:  # as Lustre mounted with noflock
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.lockf", without_locks)
    with only_run_in(tmp_path / "run"):
        assert "cannot be locked" in caplog.text and "Function not implemented" in caplog.text
    check_not_running(tmp_path / "run")
