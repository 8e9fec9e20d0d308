"""What a configuration names on the disk, looked for before anything heavy is imported, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coordexp.config.root import RunConfig
from coordexp.errors import ConfigError


def check_training_paths(config: RunConfig) -> None:
    """The model's folder, the datasets, and the checkpoint to resume from, where one is named.

    Raises:
        ConfigError: with every one that is not there.
    """
    resume = config.training.resume_from_checkpoint
    _refuse(
        [
            *_missing_folder("model.model", config.model.model),
            *_missing_file("custom.train_jsonl", config.custom.train_jsonl),
            *_missing_file("custom.val_jsonl", config.custom.val_jsonl),
            *(_missing_folder("training.resume_from_checkpoint", resume) if isinstance(resume, str) else ()),
        ]
    )


def check_evaluation_paths(config: RunConfig, model: Path | None, data: Path | None) -> None:
    """The model's folder and the dataset that is evaluated on; ``model`` and ``data`` stand in for the configuration's.

    Raises:
        ConfigError: with every one that is not there.
    """
    _refuse(
        [
            *_missing_folder("model.model" if model is None else "--model", model or config.model.model),
            *_missing_file("custom.val_jsonl" if data is None else "--data", data or config.custom.val_jsonl),
        ]
    )


def check_model_path(config: RunConfig, model: Path | None) -> None:
    """The model's folder alone. Raises ConfigError where it is not there."""
    _refuse([*_missing_folder("model.model" if model is None else "--model", model or config.model.model)])


def check_completion_paths(config: RunConfig, data: Path) -> None:
    """The model that answers and the dataset whose images it is shown. Raises ConfigError with what is not there."""
    _refuse([*_missing_folder("model.model", config.model.model), *_missing_file("DATA.jsonl", data)])


def _missing_folder(key: str, path: str | Path) -> Iterator[str]:
    if not Path(path).is_dir():
        what = "is a file, not a folder" if Path(path).exists() else "no such folder; nothing is downloaded"
        yield f"{key}: {path}: {what}"


def _missing_file(key: str, path: Path | None) -> Iterator[str]:
    if path is not None and not Path(path).is_file():
        yield f"{key}: {path}: {'is a folder, not a file' if Path(path).exists() else 'file not found'}"


def _refuse(missing: list[str]) -> None:
    if missing:
        raise ConfigError("\n".join(missing) + f"\n(relative paths start at the working directory, {Path.cwd()})")
