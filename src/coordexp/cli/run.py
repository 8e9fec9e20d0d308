"""``coordexp train``, ``demo``: what trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(train)
    app.command()(demo)


def train(config: ConfigFile) -> None:
    """Train as CONFIG.yaml says: stage 1, or stage 2 where custom.trainer_variant names one.

    To go on after an interruption, set training.resume_from_checkpoint: true in the YAML and run the same command.
    """
    from coordexp.config import load_config

    run = load_config(config)  # before the import of torch: a mistake in the YAML shows at once
    from coordexp.training.build import run_training

    console = open_console()
    no_bars_in_log_files()
    run_training(run, console, run.custom.trainer_variant or "stage 1", config)
    console.print(f"saved to {run.training.output_dir}", soft_wrap=True)


def demo(
    output: Annotated[Path, typer.Option(help="Folder of the figures, pictures and checkpoints.")] = Path(
        "outputs/demo"
    ),
) -> None:
    """Teach a small detector by rollout matching on this machine's CPU, and show what it learned."""
    from coordexp.demo import run_demo

    run_demo(output, open_console())
