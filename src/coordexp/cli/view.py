"""``coordexp view``: look at what a run answered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import counting, open_console


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(view)


def view(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FILE",
            help="A run's folder, a predictions.jsonl, or a folder or file of rollout records.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("view.html"),
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer wrote the answers [the run's own].")
    ] = None,
    max_records: Annotated[int, typer.Option(min=1, help="Show at most so many, evenly over the run.")] = 1000,
    image_side: Annotated[int, typer.Option(min=32, help="Longest side of the embedded images, in pixels.")] = 384,
    serve: Annotated[bool, typer.Option(help="Serve the page on 127.0.0.1 instead of writing a file.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0 takes a free one.")] = 0,
) -> None:
    """Write one self-contained HTML page: images, matches, tokens by role with their losses, drop reasons, curves."""
    from coordexp.viewer import collect, render
    from coordexp.viewer.collect import find_checkpoint, has_rollout_records

    vocab = None
    checkpoint = model or (find_checkpoint(source) if has_rollout_records(source) else None)
    if checkpoint is not None:
        from coordexp.cli.vocabulary import vocabulary_of

        vocab = vocabulary_of(checkpoint)
    data = collect(source, vocab, max_records)
    with counting("embedding images") as progress:
        page = render(data, image_side, progress)
    console = open_console()
    for note in data.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if serve:
        _serve(page, port)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    size = len(page.encode("utf-8")) / 1e6
    console.print(
        f"wrote {out}: {len(data.records)} records, {size:.1f} MB; open it in a browser",
        soft_wrap=True,
    )


def _serve(page: str, port: int) -> None:
    from coordexp.viewer.serve import make_server

    with make_server(page, port) as server:
        host, taken = server.server_address[:2]
        typer.echo(f"serving on http://{host!s}:{taken}/ until Ctrl-C")
        server.serve_forever()
