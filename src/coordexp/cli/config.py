"""``coordexp config``: what a configuration says, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.run import Arguments, ConfigFile, print_config

config_app = typer.Typer(help="Check, explain and compare configurations.", no_args_is_help=True)


@config_app.command("check")
def config_check_command(
    config: ConfigFile,
    arguments: Arguments = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print the resolved YAML alone, without sources.")] = False,
    only_set: Annotated[bool, typer.Option("--only-set", help="Leave out what is at its default.")] = False,
) -> None:
    """Validate a configuration and print it in full, with the file and line of each value, or "default".

    What is printed is YAML that loads back to the same run, with or without --plain.
    """
    print_config(config, arguments or (), plain, only_set)


@config_app.command("schema")
def config_schema_command() -> None:
    """Print the JSON Schema by which editors complete and check configurations."""
    from coordexp.config.explain import json_schema_text

    typer.echo(json_schema_text(), nl=False)


@config_app.command("diff")
def config_diff_command(
    left: Annotated[Path, typer.Argument(metavar="A.yaml", help="One configuration.")],
    right: Annotated[Path, typer.Argument(metavar="B.yaml", help="The other.")],
) -> None:
    """Compare two configurations key by key, as they resolve. Exits with 1 if they differ, with 0 if they do not."""
    from coordexp.config.explain import differences, explain_config

    changes = differences(explain_config(left), explain_config(right))
    for difference in changes:
        typer.echo(difference.path)
        for sign, side in (("-", difference.left), ("+", difference.right)):
            value, source = side or ("(no such entry)", "")
            typer.echo(f"  {sign} {value}" + (typer.style(f"  # {source}", dim=True) if source else ""))
    if changes:
        raise typer.Exit(1)
