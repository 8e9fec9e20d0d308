"""``coordexp train``, ``demo``: what trains a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set on top of it, e.g. training.max_steps=3; YAML values."),
]
Print = Annotated[
    bool,
    typer.Option("--print", help="Print the resolved configuration, with where each value comes from; start nothing."),
]


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(train)
    app.command()(demo)


def print_config(config: Path, arguments: Sequence[str], plain: bool = False, only_set: bool = False) -> None:
    """The resolved configuration as YAML, with sources; advice on stderr."""
    from coordexp.config import advice
    from coordexp.config.explain import annotated_yaml, explain_config, with_sources

    explained = explain_config(config, arguments=arguments)
    for line, comment in with_sources(annotated_yaml(explained, with_defaults=not only_set)):
        typer.echo(line + ("" if plain else typer.style(comment, dim=True)))
    for sentence in advice(explained.config):
        typer.secho(f"note: {sentence}", fg=typer.colors.YELLOW, err=True)


def train(config: ConfigFile, arguments: Arguments = None, print_only: Print = False) -> None:
    """Train as CONFIG.yaml says: stage 1, or stage 2 where custom.trainer_variant names one.

    To go on after an interruption, set training.resume_from_checkpoint: true in the YAML and run the same command.
    """
    from coordexp.config import load_config
    from coordexp.config.paths import check_training_paths

    given = tuple(arguments or ())
    if print_only:
        print_config(config, given)
        return
    run = load_config(config, arguments=given)  # before the import of torch: a mistake in the YAML shows at once
    check_training_paths(run)
    from coordexp.training.build import run_training

    console = open_console()
    no_bars_in_log_files()
    run_training(run, console, run.custom.trainer_variant or "stage 1", config, given)
    console.print(f"saved to {run.training.output_dir}", soft_wrap=True)


def demo(
    output: Annotated[Path, typer.Option(help="Folder of the figures, pictures and checkpoints.")] = Path(
        "outputs/demo"
    ),
) -> None:
    """Teach a small detector by rollout matching on this machine's CPU, and show what it learned."""
    from coordexp.demo import run_demo

    run_demo(output, open_console())
