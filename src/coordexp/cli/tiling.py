"""``coordexp data tile``: photographs cut into tiles. ``--tiles`` of other commands."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import AsJson, Overwrite, counting, echo

Tiles = Annotated[
    str | None,
    typer.Option(
        metavar="PIXELS|WxH", help="Answer tiles of this size, merged: for small objects in large photographs."
    ),
]
TileOverlap = Annotated[
    float | None,
    typer.Option("--overlap", min=0, max=0.9, help="Share of its side that a tile has from its neighbour [0.2]."),
]
Size = Annotated[str, typer.Option(metavar="PIXELS|WxH", help="Size of a tile, e.g. 512 or 640x480.")]
Overlap = Annotated[float, typer.Option(min=0, max=0.9, help="Share of its side that a tile has from its neighbour.")]


def tile_command(
    jsonl: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset of photographs.")],
    out: Annotated[Path, typer.Option(help="The new JSONL; its tiles are in images/NAME next to it.")],
    size: Size,
    overlap: Overlap = 0.2,
    min_area_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Leave out an object with less than this share of its area in the tile.")
    ] = 0.1,
    negatives: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the tiles without objects that is kept.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed keeps other tiles without objects.")] = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Cut photographs into overlapping tiles, each a sample of its own.

    Objects at a border are cut with it. metadata.tile has a tile's photograph and its place there.
    """
    from coordexp.api import tile

    with counting(f"cutting {jsonl.name}") as progress:
        counts = tile(
            jsonl, out, size, overlap=overlap, min_area_ratio=min_area_ratio, negatives=negatives, seed=seed,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    if as_json:
        echo(json.dumps(asdict(counts)))
        return
    echo(f"  objects, whole  {counts.whole}\n  objects, cut    {counts.cut}")
    echo(f"  left out, less than {min_area_ratio:g} of their area in the tile  {counts.left_out}")
    empty = f"{counts.negatives} of {counts.negatives + counts.negatives_left_out} without objects"
    echo(f"wrote {out}: {counts.tiles} tiles of {counts.photographs} photographs, {empty}")
    if counts.lost:
        echo(
            f"note: {counts.lost} of {counts.annotated} annotated objects are in no tile; raise --overlap or lower "
            "--min-area-ratio"
        )
    if counts.resized:
        echo(
            f"note: data convert resized {counts.resized} photographs; convert with --no-resize to keep the pixels of "
            "small objects"
        )
