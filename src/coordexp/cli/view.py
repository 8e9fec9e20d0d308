"""``coordexp view`` and ``replay``: show a run's answers, and rebuild targets from recorded answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import (
    check_checkpoint,
    counting,
    echo,
    no_bars_in_log_files,
    open_console,
    refuse_idle,
    say,
    vocabulary_of,
    written_file,
)
from coordexp.cli.train import separate_config, split_words


def view(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_FILE [OTHER]",
            help="A run's folder, a predictions.jsonl, or a folder or file of rollout records; a second one is shown "
            "next to the first.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("view.html"),
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer wrote the answers [the run's own].")
    ] = None,
    max_records: Annotated[int, typer.Option(min=1, help="Show at most N records, evenly over the run.")] = 1000,
    image_side: Annotated[
        int | None,
        typer.Option(min=32, help="Longest side of embedded images, in pixels [1024, 640 or 384, by their number]."),
    ] = None,
    serve: Annotated[
        bool, typer.Option(help="Serve the page on 127.0.0.1 instead of writing a file; enlarges original images.")
    ] = False,
    follow: Annotated[bool, typer.Option(help="Serve the page, and update it during the run.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0 takes a free one.")] = 0,
) -> None:
    """Write one HTML page of answers, matches, tokens and curves."""
    from coordexp.data.files import write_atomically
    from coordexp.viewer.collect import ViewData, collect, compare, find_checkpoint, rollout_records_at
    from coordexp.viewer.render import render
    from coordexp.viewer.serve import make_server

    if len(sources) > 2:
        raise typer.BadParameter(f"{len(sources)} runs; the page shows at most two next to each other")

    refuse_idle("--port", port and not (serve or follow), "belongs to --serve and --follow")
    model = None if model is None else check_checkpoint(model)

    def collected() -> ViewData:
        runs = []
        for source in sources:
            checkpoint = model or (find_checkpoint(source) if rollout_records_at(source) else None)
            vocab = None if checkpoint is None else vocabulary_of(checkpoint)
            # Two runs are thinned after they were paired.
            runs.append(collect(source, vocab, max_records if len(sources) == 1 else sys.maxsize))
        return runs[0] if len(runs) == 1 else compare(*runs, max_records=max_records)

    console = open_console()
    if serve or follow:
        with make_server(sources, collected, image_side, port, follow) as server:
            address, taken = server.server_address[:2]
            echo(f"serving on http://{address!s}:{taken}/ until Ctrl-C")
            server.serve_forever()
        return
    written_file(out)  # not for --serve, which writes none
    data = collected()
    with counting("embedding images") as progress:
        page = render(data, image_side, progress)
    for note in data.notes:
        say(console, f"note: {note}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    size = len(page.encode("utf-8")) / 1e6
    say(console, f"wrote {out}: {len(data.records)} records, {size:.1f} MB; open it in a browser")


def replay(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG.yaml] RECORDS [KEY=VALUE]...",
            help="The run's YAML [resolved_config.yaml next to RECORDS]; a rollouts_rank*.jsonl, or the folder of "
            "several; keys to set.",
        ),
    ],
    model: Annotated[Path | None, typer.Option(help="Checkpoint under which to compute each sample's losses.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per record.")] = False,
) -> None:
    """Rebuild the targets of recorded answers, without an engine.

    Exits with 1 if one differs.
    """
    from coordexp.checkpoints.fetch import with_model_here
    from coordexp.config import load_config
    from coordexp.inference.replay import check_keys, config_beside, replay_records

    names, arguments = split_words(words)
    config, records = separate_config(names, "RECORDS")
    run = load_config(config or config_beside(records), arguments=arguments)
    check_keys(arguments, with_losses=model is not None)
    if model is None:
        run = with_model_here(run)
    else:  # has a tokenizer of its own: the run's start may be gone
        model = check_checkpoint(model)
    no_bars_in_log_files()
    console = open_console(stderr=as_json)
    seen = changed = 0
    for one in replay_records(records, run, model=model, limit=limit):
        where = one.record.where
        seen += 1
        changed += bool(one.differences)
        if as_json:
            place = {"global_step": where.global_step, "rank": where.rank, "sample_idx": where.sample_idx}
            line = {"sample_id": one.record.sample_id, "differences": one.differences, "losses": one.losses}
            echo(json.dumps({**place, **line}, ensure_ascii=False))
            continue
        place = f"step {where.global_step + 1}, rank {where.rank}, {one.record.sample_id}"
        for difference in one.differences:
            say(console, f"{place}: {difference}")
        if one.losses is not None:
            terms = ", ".join(f"{name} {value:.4f}" for name, value in one.losses.items())
            say(console, f"{place}: {terms}")
    console.print(f"{seen} records replayed, {changed} differently")
    if changed:
        raise typer.Exit(1)
