"""The run's manifest, written before its first step: resolved configuration, versions, commit, seed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import coordexp
from coordexp import distributed
from coordexp.config import RunConfig, resolved_yaml
from coordexp.data.files import write_atomically

MANIFEST = "run_manifest.json"
RESOLVED_CONFIG = "resolved_config.yaml"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "numpy", "scipy")


def write_manifest(
    config: RunConfig, config_path: str | Path | None, output_dir: Path, overrides: Sequence[str] = ()
) -> None:
    """Write the resolved configuration and the manifest into ``output_dir``."""
    if not distributed.is_main():
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(output_dir / RESOLVED_CONFIG, resolved_yaml(config))
    manifest = {
        "schema_version": 1,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "config_path": None if config_path is None else str(Path(config_path).resolve()),
        "overrides": list(overrides),
        "resolved_config": RESOLVED_CONFIG,
        "seed": config.training.seed,
        "world_size": distributed.world_size(),
        "coordexp": coordexp.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    write_atomically(output_dir / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from; None for an installed wheel or without git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Inside somebody else's repository (a venv below it) the commit would be theirs, not ours.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
