"""``coordexp config``: what a configuration says, before anything runs."""

from __future__ import annotations

import typer

from coordexp.cli.run import ConfigFile

config_app = typer.Typer(help="Check configurations.", no_args_is_help=True)


@config_app.command("check")
def config_check_command(config: ConfigFile) -> None:
    """Validate a configuration and print it with every default filled in."""
    from coordexp.config import load_config, resolved_yaml

    typer.echo(resolved_yaml(load_config(config)), nl=False)
