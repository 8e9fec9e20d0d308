"""``coordexp data``: make, convert and check datasets; take annotations away, and add what a model finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordexp.cli.console import check_checkpoint, counting, no_bars_in_log_files, open_console
from coordexp.cli.convert import convert_app
from coordexp.cli.inspect import check_command, sample_command, split_command, stats_command
from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coordexp.data.subset import DropCounts, ObjectSize


data_app = typer.Typer(help="Make, convert and check datasets.", no_args_is_help=True)
data_app.add_typer(convert_app, name="convert")
for _name, _command in (
    ("check", check_command), ("stats", stats_command), ("split", split_command), ("sample", sample_command)
):  # fmt: skip
    data_app.command(_name)(_command)


# The keys of coordexp.data.scenes.SPECS.
SceneFamily = Literal["sparse", "moderate", "framed", "dense", "crowd", "small_crowd"]


@data_app.command("pack")
def pack_command(
    jsonl: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")],
    out: Annotated[Path, typer.Option(help="The new JSONL; its shards NAME-00000.tar, … lie beside it.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB, about.")] = 1024,
) -> None:
    """Pack a dataset's images into tar files (WebDataset's shards), which every command reads in place."""
    from coordexp.data.dataset_cache import check_images, open_records
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
    spec: Annotated[SceneFamily, typer.Option(help="How crowded they are.")] = "sparse",
    seed: Annotated[int, typer.Option(min=0, help="Scenes of different seeds differ.")] = 0,
) -> None:
    """Draw example scenes: coloured shapes with boxes and polygons."""
    from coordexp.data.scenes import SPECS, write_scenes

    typer.echo(f"wrote {write_scenes(out, count, SPECS[spec], seed)}: {count} images")


Dataset = Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")]
Out = Annotated[Path, typer.Option(help="The new JSONL; its images stay where they are.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what --out names, if it is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the counts as JSON on stdout.")]


@data_app.command("drop")
def drop_command(
    jsonl: Dataset,
    out: Out,
    keep: Annotated[float | None, typer.Option(min=0, max=1, help="Probability of keeping an annotation.")] = None,
    per_class: Annotated[
        list[str] | None, typer.Option(metavar="NAME=P", help="Of a class instead of --keep; may be repeated.")
    ] = None,
    per_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=P",
            help="Of small (box below 32² pixels), medium or large (above 96²) objects instead of --keep; may be "
            "repeated. A class's own probability goes first.",
        ),
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Images may lose all annotations, instead of keeping one at least.")
    ] = False,
    soft: Annotated[
        bool, typer.Option("--soft", help="Take the soft objects away, and leave all annotations.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another draw.")] = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Leave annotations out at random, as annotators do; or take the soft objects out."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.record_line import write_jsonl

    _refuse_existing(out, overwrite)
    if soft:
        if keep is not None or per_class or per_size or allow_empty:
            raise ConfigError("--soft takes away soft objects and nothing else; leave out the other options")
        from coordexp.data.subset import without_soft

        left, gone = without_soft(read_jsonl(jsonl))
        write_jsonl(left, out)
        annotated = sum(len(record.objects) for record in left)
        fields = {"images": len(left), "kept": annotated, "dropped": gone}
        typer.echo(json.dumps(fields) if as_json else f"wrote {out}: {gone} soft objects left out, {annotated} others")
        return
    from coordexp.data.subset import DropRates, drop_annotations

    rates = DropRates(1.0 if keep is None else keep, _rates("--per-class", per_class), _sizes(per_size), allow_empty)
    records, counts = drop_annotations(read_jsonl(jsonl), rates, seed)
    write_jsonl(records, out)
    typer.echo(json.dumps(counts.to_json(), ensure_ascii=False) if as_json else _drop_text(counts, out))


@data_app.command("complete")
def complete_command(
    jsonl: Dataset,
    out: Out,
    model: Annotated[Path | None, typer.Option(help="The checkpoint that answers [--config's model.model].")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run's YAML: prompt, decoding and backend [the run that --model comes from, and hf]."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What the model is asked, if neither of them says.")] = None,
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
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images answered at once [--config's, or 8].")] = None,
    sheet: Annotated[Path | None, typer.Option(help="PNG of the images with the most likely missed objects.")] = None,
    sheet_images: Annotated[int, typer.Option(min=1, max=100, help="Images on the sheet.")] = 12,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Add what a model finds and the annotations lack, as soft objects: text taught, coordinates not.

    Answers are written as they come. The same command again goes on where it stopped.
    """
    _refuse_existing(out, overwrite)
    if model is not None:
        check_checkpoint(model)
    from coordexp.config.environment import check_completion_paths
    from coordexp.inference.completion import CompletionRules, completion_config, run_completion

    rules = CompletionRules(threshold, max_overlap, min_size, weight, known_descs)
    run = completion_config(model, config=config, prompt=prompt, batch_size=batch_size)
    check_completion_paths(run, jsonl)
    no_bars_in_log_files()
    console = open_console(stderr=as_json)
    completed = run_completion(run, console, source=jsonl, out=out, rules=rules, sheet=sheet, sheet_images=sheet_images)
    if console.quiet:
        return
    counts = completed.counts.to_json()
    if as_json:
        typer.echo(json.dumps({**counts, "files": [str(path) for path in completed.files]}, ensure_ascii=False))
        return
    typer.echo(
        "\n".join([*_completion_lines(counts, completed.prompt), f"wrote {', '.join(map(str, completed.files))}"])
    )


def _completion_lines(counts: Mapping[str, Any], prompt: str | None) -> list[str]:
    lines = [f"asked: {'the built-in prompt' if prompt is None else prompt}"]
    outcomes = counts["outcomes"]
    width = max(map(len, outcomes))
    lines += [f"  {name:<{width}}  {count}" for name, count in outcomes.items() if count]
    lines.append(
        f"{counts['predicted']} objects predicted in {counts['images']} images with {counts['annotated']} annotations: "
        f"{outcomes['added']} added"
    )
    silent = counts["images"] - counts["images_with_predictions"]
    if silent > counts["images"] / 2:
        lines.append(
            f"note: nothing was predicted in {silent} images. Was the model trained with this prompt? Another one is "
            "named by --prompt, or by the YAML of its run with --config"
        )
    return lines


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise DataError("exists already; name another file, or say --overwrite", path=path)


def _drop_text(counts: DropCounts, out: Path) -> str:
    fields = counts.to_json()
    groups = {**fields["classes"], **{name: pair for name, pair in fields["sizes"].items() if pair[1]}}
    width = max(map(len, groups), default=0)
    lines = [f"  {name:<{width}}  {kept} of {of}" for name, (kept, of) in groups.items()]
    total = fields["kept"] + fields["dropped"]
    kept_last = f", {counts.spared} of them the last of their image" if counts.spared else ""
    lines.append(f"wrote {out}: {counts.images} images, {fields['kept']} of {total} annotations kept{kept_last}")
    if counts.emptied:
        lines.append(f"{counts.emptied} images lost all annotations")
    return "\n".join(lines)


def _sizes(given: list[str] | None) -> dict[ObjectSize, float]:
    from coordexp.data.subset import SIZES

    rates = _rates("--per-size", given)
    other = sorted(rates.keys() - set(SIZES))
    if other:
        raise ConfigError(f"--per-size {other[0]}: expected {', '.join(SIZES)}")
    return {size: rates[size] for size in SIZES if size in rates}


def _rates(option: str, given: list[str] | None) -> dict[str, float]:
    rates: dict[str, float] = {}
    for text in given or ():
        name, _, rate = text.rpartition("=")
        try:
            value = float(rate)
        except ValueError:
            value = -1.0
        if not name or not 0 <= value <= 1:
            raise ConfigError(f"{option} {text!r}: expected a name and a probability, e.g. {option} 'medium=0.3'")
        if name in rates:
            raise ConfigError(f"{option} names {name!r} twice; keep one of them")
        rates[name] = value
    return rates
