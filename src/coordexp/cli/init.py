"""``coordexp init``: a configuration to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import check_checkpoint, open_console, say
from coordexp.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(init)


def init(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A JSONL, or the folder that coordexp data convert wrote.")
    ],
    model: Annotated[Path, typer.Option(help="The checkpoint to start from; it knows the coordinate tokens.")],
    stage: Annotated[int, typer.Option(min=1, max=2, help="1: supervised; 2: rollout matching.")] = 1,
    val: Annotated[Path | None, typer.Option(help="JSONL that evaluation answers [val.jsonl beside DATA].")] = None,
    out: Annotated[Path | None, typer.Option(help="The YAML [stage1.yaml or stage2.yaml].")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Folder of the run [outputs/stage1 or stage2].")] = None,
    cpu: Annotated[
        bool | None, typer.Option("--cpu/--gpu", help="Where it will run [on a GPU if nvidia-smi is there].")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the YAML if it is there.")] = False,
) -> None:
    """Write a commented YAML for this data, this model and this machine; change in it what you like."""
    path = out or Path(f"stage{stage}.yaml")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path}: exists already; name another file with --out, or say --overwrite")
    check_checkpoint(model)
    import shutil

    from coordexp.config import load_config
    from coordexp.files import write_atomically
    from coordexp.first_run import first_configuration, look_at

    at_hand = look_at(data, model, val)
    on_cpu = shutil.which("nvidia-smi") is None if cpu is None else cpu
    run = output_dir or Path(f"outputs/stage{stage}")
    text = first_configuration(at_hand, model, 2 if stage == 2 else 1, run, on_cpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    load_config(path)  # what is written is what `coordexp config check` accepts
    console = open_console()
    say(
        console,
        f"wrote {path}: {at_hand.images} images, {at_hand.classes} classes, on {'the CPU' if on_cpu else 'a GPU'}",
    )
    if at_hand.val is None:
        say(console, "note: nothing is evaluated; coordexp data split makes a val set, which --val names")
    say(console, f"next: coordexp train {path}")
