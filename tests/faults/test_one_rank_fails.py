"""If one rank of two fails, in any phase, it prints its own error and the other ends within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from faults.runs import Death, run_all
from faults.test_out_of_memory import ON_GPU
from support.tiny_run import run_config

TIMEOUT_S = 120  # training.ddp_timeout, for which no rank may wait
KEYS: dict[str, Any] = {
    "training__max_steps": 3,
    "training__logging_steps": 1,
    "training__eval_strategy": "steps",
    "training__eval_steps": 2,
    "training__save_strategy": "steps",
    "training__save_steps": 1,
    "training__resume_from_checkpoint": True,
    "training__ddp_timeout": TIMEOUT_S,
    "rollout_matching__monitor_dump": {"enabled": True, "every_steps": 1},
}
How = Literal["together", "alone"]
# Phase: the call that fails on rank 1, in the last step or the last save before it; how the ranks end under DDP and
# under FSDP2. Together: with the same error. Alone: the other waits inside a call, and says in one line that it lost
# rank 1.
PHASES: dict[str, tuple[str, int, How, How]] = {
    "reading": ("_owning_memory", 5, "together", "together"),
    "rollouts": ("_generate_batch", 4, "together", "alone"),
    "parsing": ("parse_rollout", 5, "together", "together"),
    "targets": ("build_target", 5, "together", "together"),
    "the first row": ("to", 3, "together", "together"),
    "forward": ("scores", 3, "together", "alone"),
    "backward": ("backward", 3, "alone", "alone"),
    "clipping": ("clip_grad_norm_", 3, "alone", "alone"),
    "a callback": ("on_log", 4, "together", "together"),
    "evaluation, rollouts": ("_generate_batch", 3, "together", "alone"),
    "evaluation, scores": ("_score", 1, "together", "alone"),
    "evaluation, figures": ("summarise", 1, "together", "together"),
    "saving segments": ("save_carry_buffer", 2, "together", "together"),
    "saving random states": ("random_states", 2, "together", "alone"),
    "sealing": ("checksums", 2, "together", "together"),
}
ERRORS = {"a bug": "this rank is broken", "memory": ON_GPU}
SAID = {"a bug": "this rank is broken", "memory": "2.50 GiB were needed, and GPU 1 has 15.06 MiB"}
QUICK = (
    ("a callback", "DDP", "a bug"), ("evaluation, scores", "FSDP2", "a bug"),
    ("forward", "DDP", "memory"), ("rollouts", "FSDP2", "memory"),
)  # fmt: skip  # the others: `make faults`
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.campaign, id=" - ".join(case))
    for case in ((phase, by, error) for phase in PHASES for by in ("DDP", "FSDP2") for error in ERRORS)
]


@pytest.mark.parametrize(("phase", "parallelism", "error"), CASES)
def test_a_rank_that_fails_names_its_error_and_the_other_ends_within_seconds(
    phase: str, parallelism: str, error: str, tmp_path: Path, seen: Callable[[object], None]
) -> None:
    """The run is resumed by its two ranks afterwards."""
    aim, call, by_ddp, by_fsdp = PHASES[phase]
    how = by_ddp if parallelism == "DDP" else by_fsdp
    run_config(tmp_path, 2, **KEYS, fsdp__enabled=parallelism == "FSDP2")
    begun = time.monotonic()
    statuses = run_all(tmp_path, 2, Death(aim, call, "before", ERRORS[error]), dies=1)
    waited = time.monotonic() - begun
    said = [(tmp_path / f"log{rank}").read_text() for rank in (0, 1)]
    own = 1 if error == "a bug" else 2
    assert statuses == ([own, own] if how == "together" else [2, own]), said
    assert SAID[error] in said[1], said[1]
    if how == "together":
        assert SAID[error] in said[0], said[0]
    else:
        assert "error: rank 0: another process of this run ended" in said[0] and "Traceback" not in said[0], said[0]
    assert waited < TIMEOUT_S, "waited for ddp_timeout"
    assert run_all(tmp_path, 2) == [0, 0], (tmp_path / "log0").read_text()[-3000:]
    seen(f"{how}, exit codes {statuses}, {waited:.0f} s after the start; resumed")
