"""``coordexp replay``: what recorded answers would be taught today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console

DIFFERENT = 1


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(replay)


def replay(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="A rollouts_rank*.jsonl, or the folder that holds them.")
    ],
    config: Annotated[Path | None, typer.Option(help="The run's YAML [resolved_config.yaml beside RECORDS].")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint under which to compute each sample's losses.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per record.")] = False,
) -> None:
    """Parse, match and build recorded answers again, without any engine; exit 1 where a target differs."""
    from coordexp.config import load_config
    from coordexp.inference.replay import config_beside, replay_records

    run = load_config(config or config_beside(records))
    no_bars_in_log_files()
    console = open_console(stderr=as_json)
    seen = changed = 0
    for one in replay_records(records, run, model=model, limit=limit):
        where = one.record.where
        seen += 1
        changed += bool(one.differences)
        if as_json:
            line = {
                "global_step": where.global_step,
                "rank": where.rank,
                "sample_idx": where.sample_idx,
                "sample_id": one.record.sample_id,
                "differences": one.differences,
                "losses": one.losses,
            }
            typer.echo(json.dumps(line, ensure_ascii=False))
            continue
        place = f"step {where.global_step + 1}, rank {where.rank}, {one.record.sample_id}"
        for difference in one.differences:
            console.print(f"{place}: {difference}", soft_wrap=True)
        if one.losses is not None:
            terms = ", ".join(f"{name} {value:.4f}" for name, value in one.losses.items())
            console.print(f"{place}: {terms}", soft_wrap=True)
    console.print(f"{seen} records replayed, {changed} differently")
    if changed:
        raise typer.Exit(DIFFERENT)
