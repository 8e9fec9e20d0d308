"""``debug``: one switch that makes any run small."""

from __future__ import annotations

from pydantic import Field

from coordexp.config.strict import FilePath, StrictModel


class DebugConfig(StrictModel):
    """Replacements for keys of other sections, put in their place when the file is read and ``enabled`` is true."""

    enabled: bool = Field(default=False, description="put the keys below in place of those they stand for")
    output_dir: FilePath | None = Field(default=None, description="stands for training.output_dir; null leaves it")
    train_sample_limit: int | None = Field(
        default=None, ge=1, description="stands for custom.train_sample_limit; null leaves it"
    )
    val_sample_limit: int | None = Field(
        default=None, ge=1, description="stands for custom.val_sample_limit; null leaves it"
    )


DEBUG_STANDS_FOR: dict[str, tuple[str, str]] = {
    "output_dir": ("training", "output_dir"),
    "train_sample_limit": ("custom", "train_sample_limit"),
    "val_sample_limit": ("custom", "val_sample_limit"),
}
