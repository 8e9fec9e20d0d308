"""``coordexp data``: make, convert and check datasets."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli import completion, inspect
from coordexp.cli.console import counting
from coordexp.cli.convert import convert_app

data_app = typer.Typer(help="Make, convert and check datasets.", no_args_is_help=True)
data_app.add_typer(convert_app, name="convert")
inspect.register(data_app)
completion.register(data_app)


class SceneFamily(StrEnum):
    """Families of generated scenes; the keys of ``coordexp.data.scenes.SPECS``."""

    SPARSE = "sparse"
    MODERATE = "moderate"
    FRAMED = "framed"
    DENSE = "dense"
    CROWD = "crowd"


@data_app.command("pack")
def pack_command(
    jsonl: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")],
    out: Annotated[Path, typer.Option(help="The new JSONL; its shards NAME-00000.tar, … lie beside it.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB, about.")] = 1024,
) -> None:
    """Pack a dataset's images into tar files (WebDataset's shards), which every command reads in place."""
    from coordexp.data.kept_records import check_images, open_records
    from coordexp.data.shards import pack

    records = open_records(jsonl)
    check_images(records)
    with counting(f"packing {jsonl.name}") as progress:
        count, shards = pack(records, out, shard_mb << 20, progress)
    typer.echo(f"wrote {out}: {count} records, their images in {shards} shard{'s' if shards > 1 else ''}")


@data_app.command("scenes")
def scenes_command(
    out: Annotated[Path, typer.Option(help="Folder of scenes.jsonl and its images.")],
    count: Annotated[int, typer.Option(min=1, help="Number of scenes.")],
    spec: Annotated[SceneFamily, typer.Option(help="How crowded they are.")] = SceneFamily.SPARSE,
    seed: Annotated[int, typer.Option(min=0, help="Scenes of different seeds differ.")] = 0,
) -> None:
    """Draw example scenes: coloured shapes with boxes and polygons."""
    from coordexp.data.scenes import SPECS, write_scenes

    typer.echo(f"wrote {write_scenes(out, count, SPECS[spec.value], seed)}: {count} images")
