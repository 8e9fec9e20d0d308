"""``coordexp model``: make checkpoints that know the coordinate tokens."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import refuse_filled

model_app = typer.Typer(help="Make checkpoints that know the coordinate tokens.", no_args_is_help=True)


@model_app.command("tiny")
def tiny_command(
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny Qwen3-VL checkpoint with random weights, for experiments on a CPU."""
    refuse_filled(out)
    from coordexp.modeling.tiny import build_tiny_checkpoint

    typer.echo(f"wrote {build_tiny_checkpoint(out, seed)}")


@model_app.command("expand-vocab")
def expand_vocab_command(
    checkpoint: Annotated[Path, typer.Argument(help="A Qwen3-VL checkpoint folder; it is left as it is.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
) -> None:
    """Add the 1000 coordinate tokens to a Qwen3-VL checkpoint."""
    from coordexp.modeling.expand_vocab import expand_vocab

    expand_vocab(checkpoint, out)
    typer.echo(f"wrote {out}")


class Dtype(StrEnum):
    """Number types of saved weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@model_app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, such as a run's output_dir.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    dtype: Annotated[Dtype, typer.Option(help="Number type of the weights.")] = Dtype.BFLOAT16,
) -> None:
    """Write a run's model as a plain checkpoint: weights, tokenizer and processor, nothing else."""
    refuse_filled(out)
    from coordexp.modeling.export import export_checkpoint

    typer.echo(f"wrote {export_checkpoint(checkpoint, out, dtype.value)}")
