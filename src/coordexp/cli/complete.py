"""``coordexp data complete``: objects that a model finds and the annotations lack."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import (
    AsJson,
    Out,
    Overwrite,
    check_checkpoint,
    echo,
    no_bars_in_log_files,
    on_interrupt,
    open_console,
    picture,
)
from coordexp.cli.tiling import TileOverlap, Tiles
from coordexp.cli.train import separate_config, split_words


def complete_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG.yaml] DATA.jsonl [KEY=VALUE]...",
            help="A run's YAML, for prompt, decoding and backend [those of the run that wrote --model, and hf]; the "
            "dataset; keys to set.",
        ),
    ],
    out: Out,
    model: Annotated[Path | None, typer.Option(help="The checkpoint that answers [CONFIG.yaml's model.model].")] = None,
    prompt: Annotated[str | None, typer.Option(help="Another prompt [theirs].")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images answered at once [CONFIG.yaml's, or 8].")
    ] = None,
    tiles: Tiles = None,
    overlap: TileOverlap = None,
    sheet: Annotated[
        Path | None, typer.Option(callback=picture, help="Picture of the likeliest missed objects.")
    ] = None,
    sheet_images: Annotated[int, typer.Option(min=1, max=100, help="Images on the sheet.")] = 12,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    threshold: Annotated[float, typer.Option(min=0.001, max=1, help="Least confidence of an added object.")] = 0.5,
    max_overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Most mask IoU of an added object with any other one.")
    ] = 0.2,
    min_size: Annotated[
        float, typer.Option(min=0, max=100, help="Least size: square root of its box's share of the image, %.")
    ] = 1.0,
    weight: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="Weight of every added object [its confidence].")
    ] = None,
    known_descs: Annotated[
        bool, typer.Option("--known-descs", help="Add only descriptions that the dataset's annotations hold.")
    ] = False,
) -> None:
    """Add what a model finds and the annotations lack.

    Added objects are soft: their text is trained, their coordinates are not. Answers are written as they arrive. The
    same command again continues where it stopped.
    """
    from coordexp.config.checks import check_paths
    from coordexp.data.tiles import Tiling
    from coordexp.inference.completion import (
        CompletionRules,
        answers_folder,
        check_files,
        completion_config,
        run_completion,
    )

    names, arguments = split_words(words)
    config, jsonl = separate_config(names, "DATA.jsonl")
    check_paths({} if model is None else {"--model": model}, {"CONFIG.yaml": config, "DATA.jsonl": jsonl})
    check_files(jsonl, out, sheet, sheet_images, overwrite)
    model = None if model is None else check_checkpoint(model)
    run = completion_config(model, config=config, prompt=prompt, batch_size=batch_size, arguments=arguments)
    check_paths({"model.model": run.model.model})
    no_bars_in_log_files()
    console = open_console(stderr=as_json)
    rules = CompletionRules(threshold, max_overlap, min_size, weight, known_descs)
    tiling = Tiling.asked(tiles, overlap)
    answers = answers_folder(out)
    continues = f"answers so far are in {answers}; the same command continues"
    with on_interrupt(lambda: continues if answers.exists() else "nothing is answered yet"):
        completed = run_completion(
            run, console, source=jsonl, out=out, rules=rules, sheet=sheet, sheet_images=sheet_images, tiling=tiling
        )
    if completed is None or console.quiet:
        return
    counts, files = asdict(completed[0]), completed[1]
    if as_json:
        echo(json.dumps({**counts, "files": [str(path) for path in files]}, ensure_ascii=False))
        return
    prompt = run.template.prompt
    echo(f"asked: {'the built-in prompt' if prompt is None else prompt}")
    outcomes = counts["outcomes"]
    width = max(map(len, outcomes))
    for name, count in outcomes.items():
        if count:
            echo(f"  {name:<{width}}  {count}")
    echo(
        f"{counts['predicted']} objects predicted in {counts['images']} images with {counts['annotated']} annotations: "
        f"{outcomes['added']} added"
    )
    silent = counts["images"] - counts["images_with_predictions"]
    if silent > counts["images"] / 2:
        echo(
            f"note: no objects were predicted in {silent} images. Was the model trained with this prompt? Give another "
            "with --prompt, or name the run's YAML"
        )
    echo(f"wrote {', '.join(map(str, files))}")
