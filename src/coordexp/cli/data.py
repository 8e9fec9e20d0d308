"""``coordexp data``: make, convert and check datasets; take parts of them, and add objects that a model finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordexp.cli.complete import complete_command
from coordexp.cli.console import AsJson, Out, Overwrite, check_checkpoint, counting, echo, open_console, picture
from coordexp.cli.convert import convert_app
from coordexp.cli.tiling import tile_command
from coordexp.cli.usage import App
from coordexp.errors import ConfigError, DataError
from coordexp.heavy_imports import heavy_imports
from coordexp.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from coordexp.config import RunConfig
    from coordexp.data.dataset_check import DatasetCheck
    from coordexp.data.subset import ObjectSize
    from coordexp.records import ImageRecord, RolloutRequest

Dataset = Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another draw.")]
# The keys of coordexp.data.scenes.SPECS.
SceneFamily = Literal["sparse", "moderate", "framed", "dense", "crowd", "small_crowd"]
_SHOWN = 20
_EXAMPLES = 5  # of a finding that training accepts
_EPOCHS = 4  # tiles of a row of --augment

data_app = App("Make, convert and check datasets.")
data_app.add_typer(convert_app, name="convert")
data_app.add("tile", "coordexp data tile data/mine/train.jsonl --size 512 --out data/tiles/train.jsonl")(tile_command)


@data_app.add("check", "coordexp data check data/mine/train.jsonl --sheet sheet.png")
def check_command(
    jsonl: Dataset,
    limit: Annotated[int | None, typer.Option(min=1, help="Check only the first N records.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose prompt, tokenizer and processor count tokens and draw the sheet."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Find samples of more tokens: the run's global_max_length. Needs --model.")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(callback=picture, help="Picture of objects, drawn after a round trip through tokens.")
    ] = None,
    augment: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml", help="Draw views of this run's data.augment: one row per image, one tile per epoch."
        ),
    ] = None,
    sheet_images: Annotated[int, typer.Option(min=1, max=100, help="Images on the sheet.")] = 12,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image: its body may be cut off.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every line, image and object of a dataset.

    Exits with 2 if training would refuse it.
    """
    if max_tokens is not None and model is None:
        raise ConfigError("--max-tokens needs a checkpoint's tokenizer and processor; name one with --model")
    if augment is not None and sheet is None:
        raise ConfigError("--augment is drawn on a sheet; name its file with --sheet")
    if model is not None:
        model = check_checkpoint(model)
    run = None
    if augment is not None:
        from coordexp.config import load_config

        run = load_config(augment)
        if run.data.augment is None:
            raise ConfigError(f"{augment}: has no section data.augment, so there is nothing to draw with --augment")
    from coordexp.data.dataset_check import ERRORS, check_jsonl

    count_tokens = None
    if model is not None:
        with heavy_imports():
            from coordexp.modeling.inputs import token_counter

        count_tokens = token_counter(model)
    with counting("checking") as progress:
        check = check_jsonl(
            jsonl, limit=limit, count_tokens=count_tokens, max_tokens=max_tokens, deep=deep, progress=progress
        )
    drawn = sheet is not None and _draw_sheet(check, model, sheet, sheet_images, run)
    if as_json:
        echo(json.dumps(check.to_json(), ensure_ascii=False))
    else:
        console = open_console()
        console.print(_findings(check))
        console.print(_histograms(check))
        if sheet is not None:
            said = f"wrote {sheet}" if drawn else f"note: {sheet} is not written: no record is valid"
            console.print(said, soft_wrap=True)
        if not check.errors:
            noted = sum(check.counts().values())
            notes = f"; {noted} finding{'s' * (noted != 1)} above to look at" if noted else ""
            how = "" if deep else "; of images, headers only were read: --deep decodes them"
            part = f"the first {check.lines} records of " if check.lines == limit else ""
            console.print(f"sound: training accepts {part}{check.path}{notes}{how}", soft_wrap=True)
    if check.errors:
        first = next(problem for problem in check.problems if problem.finding in ERRORS)
        count = f"{check.errors} finding{'s' * (check.errors != 1)}"
        raise DataError(
            f"training refuses it for {count}; the first: {first.where}: {first.finding}: {first.detail}", path=jsonl
        )


@data_app.add("stats", "coordexp data stats data/mine/train.jsonl")
def stats_command(jsonl: Dataset, as_json: AsJson = False) -> None:
    """Show classes, geometries, densities and box sizes."""
    from coordexp.data.dataset_check import DatasetCheck, histogram
    from coordexp.data.jsonl import read_jsonl
    from coordexp.geometry import aabb

    check = DatasetCheck(jsonl, records=read_jsonl(jsonl))
    boxes = [aabb(obj) for record in check.records for obj in record.objects]
    sides = [round(((x2 - x1) * (y2 - y1)) ** 0.5 / 9.99) for x1, y1, x2, y2 in boxes]
    sizes = histogram(sides, (0, 2, 5, 10, 20, 40, 60, 80, 100))
    if as_json:
        fields = check.to_json()
        names = ("path", "images", "objects", "soft_objects", "classes", "kinds", "density")
        kept = {name: fields[name] for name in names}
        echo(json.dumps({**kept, "size_percent": sizes}, ensure_ascii=False))
        return
    console = open_console()
    console.print(_histograms(check))
    console.print(_bars_of({"objects by size: square root of their box's share of the image, %": sizes}))


@data_app.add("split", "coordexp data split data/mine/all.jsonl --shares train=0.8,val=0.2")
def split_command(
    jsonl: Dataset,
    shares: Annotated[str, typer.Option(help="Names and shares, which sum to 1.")] = "train=0.8,val=0.1,test=0.1",
    seed: Seed = 0,
) -> None:
    """Split a dataset into NAME.train.jsonl, NAME.val.jsonl, …

    The parts are written next to it; records of one image stay together.
    """
    from coordexp.data import files, read_jsonl, subset, write_jsonl
    from coordexp.data.class_list import unseen_note

    wanted = _rates("--shares", [part.strip() for part in shares.split(",")])
    if not all(name.isidentifier() and share > 0 for name, share in wanted.items()):
        raise ConfigError(f"--shares {shares!r}: expected names and shares, e.g. train=0.9,val=0.1")
    parts = subset.split_records(read_jsonl(jsonl), list(wanted.values()), seed)
    paths = [jsonl.with_name(f"{jsonl.stem}.{name}.jsonl") for name in wanted]
    for path in paths:
        files.check_new_file(path, fix="remove or rename it")
    train = dict(zip(wanted, parts, strict=True)).get("train", [])
    for path, part in zip(paths, parts, strict=True):
        echo(f"wrote {path}: {write_jsonl(part, path)} records")
        if (note := unseen_note(train, part)) is not None:
            echo(f"note: {path}: {note}", fg=typer.colors.YELLOW, err=True)


@data_app.add("sample", "coordexp data sample data/mine/train.jsonl --count 100 --out data/mine/small.jsonl")
def sample_command(
    jsonl: Dataset,
    count: Annotated[int, typer.Option(min=1, help="Number of records.")],
    out: Out,
    seed: Seed = 0,
) -> None:
    """Draw records at random."""
    from coordexp.data import files, read_jsonl, subset, write_jsonl

    files.check_new_file(out, fix="name another file")
    echo(f"wrote {out}: {write_jsonl(subset.sample_records(read_jsonl(jsonl), count, seed), out)} records")


@data_app.add("pack", "coordexp data pack data/mine/train.jsonl --out packed/train.jsonl")
def pack_command(
    jsonl: Dataset,
    out: Annotated[Path, typer.Option(help="The new JSONL; its shards NAME-00000.tar, … are next to it.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB, about.")] = 1024,
) -> None:
    """Pack a dataset's images into tar files.

    They are WebDataset's shards; every command reads them in place.
    """
    from coordexp.data.dataset_cache import check_images, open_records
    from coordexp.data.subset import pack

    records = open_records(jsonl)
    check_images(records)
    with counting(f"packing {jsonl.name}") as progress:
        count, shards = pack(records, out, shard_mb << 20, progress)
    echo(f"wrote {out}: {count} records, their images in {shards} shard{'s' if shards > 1 else ''}")


@data_app.add("scenes", "coordexp data scenes --out data/scenes --count 1000")
def scenes_command(
    out: Annotated[Path, typer.Option(help="Folder of scenes.jsonl and its images.")],
    count: Annotated[int, typer.Option(min=1, help="Number of scenes.")],
    spec: Annotated[SceneFamily, typer.Option(help="How crowded they are.")] = "sparse",
    seed: Annotated[int, typer.Option(min=0, help="Scenes of different seeds differ.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Draw example scenes of coloured shapes."""
    from coordexp.data.files import check_new_file
    from coordexp.data.scenes import JSONL, SPECS, write_scenes

    check_new_file(out / JSONL, overwrite, "name another folder, or say --overwrite")
    echo(f"wrote {write_scenes(out, count, SPECS[spec], seed)}: {count} images")


@data_app.add(
    "rename",
    "coordexp data rename data/mine/train.jsonl Raccoon=raccoon traffic_light='traffic light' --out data/named.jsonl",
)
def rename_command(
    jsonl: Dataset,
    renames: Annotated[list[str], typer.Argument(metavar="OLD=NEW...", help="Class names and what they become.")],
    out: Out,
    overwrite: Overwrite = False,
) -> None:
    """Rename classes, or join them with others."""
    from coordexp.data import files, read_jsonl, subset, write_jsonl

    files.check_new_file(out, overwrite)
    records = read_jsonl(jsonl)
    pairs = subset.read_renames(renames)
    renamed, counts = subset.rename_classes(records, pairs)
    write_jsonl(renamed, out)
    for old, count in counts.items():
        echo(f"  {printable(old)} -> {printable(pairs[old])}: {count} objects")
    echo(f"wrote {out}: {len(renamed)} images")


@data_app.add("drop", "coordexp data drop data/mine/train.jsonl --keep 0.5 --out data/mine/half.jsonl")
def drop_command(
    jsonl: Dataset,
    out: Out,
    keep: Annotated[float | None, typer.Option(min=0, max=1, help="Probability of keeping an annotation.")] = None,
    per_class: Annotated[
        list[str] | None, typer.Option(metavar="NAME=P", help="For a class, instead of --keep; may be repeated.")
    ] = None,
    per_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=P",
            help="For small (box below 32² pixels), medium or large (above 96²) objects instead of --keep; may be "
            "repeated. A class's own probability goes first.",
        ),
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Images may lose all annotations, instead of keeping one at least.")
    ] = False,
    soft: Annotated[bool, typer.Option("--soft", help="Remove the soft objects and keep all annotations.")] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Leave annotations out at random, or remove soft objects."""
    from coordexp.data import files, read_jsonl, subset, write_jsonl

    if files.is_same_file(jsonl, out):
        raise DataError("is the dataset itself, whose annotations would be lost; name another file", path=out)
    files.check_new_file(out, overwrite)
    if soft:
        if keep is not None or per_class or per_size or allow_empty:
            raise ConfigError("--soft removes only soft objects; leave out the other options")
        left, gone = subset.without_soft(read_jsonl(jsonl))
        write_jsonl(left, out)
        annotated = sum(len(record.objects) for record in left)
        fields = {"images": len(left), "kept": annotated, "dropped": gone}
        echo(json.dumps(fields) if as_json else f"wrote {out}: {gone} soft objects left out, {annotated} others")
        return
    by_size = _rates("--per-size", per_size)
    if other := sorted(by_size.keys() - set(subset.SIZES)):
        raise ConfigError(f"--per-size {other[0]}: expected {', '.join(subset.SIZES)}")
    sizes: dict[ObjectSize, float] = {size: by_size[size] for size in subset.SIZES if size in by_size}
    rates = subset.DropRates(1.0 if keep is None else keep, _rates("--per-class", per_class), sizes, allow_empty)
    records, counts = subset.drop_annotations(read_jsonl(jsonl), rates, seed)
    write_jsonl(records, out)
    fields = counts.to_json()
    if as_json:
        echo(json.dumps(fields, ensure_ascii=False))
        return
    groups = [*fields["classes"].items(), *(size for size in fields["sizes"].items() if size[1][1])]
    width = max((len(printable(name)) for name, _ in groups), default=0)
    for name, (kept, of) in groups:
        echo(f"  {printable(name):<{width}}  {kept} of {of}")
    total = fields["kept"] + fields["dropped"]
    kept_last = f", {counts.spared} of them the last of their image" if counts.spared else ""
    echo(f"wrote {out}: {counts.images} images, {fields['kept']} of {total} annotations kept{kept_last}")
    if counts.emptied:
        echo(f"{counts.emptied} images lost all annotations")


data_app.add(
    "complete",
    "coordexp data complete data/mine/half.jsonl --model outputs/stage1 --out data/mine/completed.jsonl",
)(complete_command)


def _draw_sheet(check: DatasetCheck, model: Path | None, sheet: Path, count: int, run: RunConfig | None) -> bool:
    """Draw objects after a round trip through tokens, and report records that it changes. With ``run``, draw records
    as its first epochs see them. False if no record is valid, so that nothing is drawn."""
    from coordexp.cli.console import vocabulary_of
    from coordexp.data.dataset_check import ERRORS, Finding
    from coordexp.data.files import asset
    from coordexp.evaluation.drawing import draw_contact_sheet, round_trip

    vocab = vocabulary_of(asset("checkpoints/demo-stage1") if model is None else model)
    for record in check.records:
        if round_trip(record.objects, vocab) != list(record.objects):
            check.add(Finding.ROUND_TRIP, record.sample_id, "the objects read back from its tokens differ")
    broken = {problem.where for problem in check.problems if problem.finding in ERRORS}
    valid = [record for record in check.records if record.sample_id not in broken]
    if not valid:
        return False
    rows = count if run is None else max(1, count // _EPOCHS)
    chosen = list(range(0, len(valid), max(1, len(valid) // rows)))[:rows]
    if run is None:
        draw_contact_sheet([valid[index] for index in chosen], vocab, sheet)
        return True
    from coordexp.data.dataset import RecordDataset

    def without_prompt(record: ImageRecord) -> RolloutRequest:
        raise AssertionError(f"{record.sample_id}: views have no prompts")

    seen = RecordDataset(valid, without_prompt, run.custom.object_ordering, run.training.seed, run.data.augment)
    views = [seen.view(index, epoch) for index in chosen for epoch in range(_EPOCHS)]
    draw_contact_sheet([record for record, _ in views], vocab, sheet, _EPOCHS, [image for _, image in views])
    return True


def _findings(check: DatasetCheck) -> Table:
    from rich.table import Table
    from rich.text import Text

    from coordexp.data.dataset_check import ERRORS

    table = Table("finding", "count", "where", title=Text(printable(check.path)), title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("lines", str(check.lines), f"{len(check.records)} of them valid records")
    for finding, count in sorted(check.counts().items(), key=lambda item: (item[0] not in ERRORS, item[0])):
        table.add_section()
        style, most = ("red", _SHOWN) if finding in ERRORS else ("", _EXAMPLES)
        for k, problem in enumerate([problem for problem in check.problems if problem.finding is finding][:most]):
            table.add_row(
                Text(finding.value if k == 0 else "", style),
                str(count) if k == 0 else "",
                Text(f"{problem.where}: {problem.detail}"),  # a Text: a class may be called "[red] car"
            )
        if count > most:
            table.add_row("", "", f"… and {count - most} more; all with --json")
    return table


def _histograms(check: DatasetCheck) -> Table:
    from coordexp.data.dataset_check import histogram

    found = check.to_json()
    soft = f" ({found['soft_objects']} of them soft)" if found["soft_objects"] else ""
    classes = found["classes"]
    most = f": the {_SHOWN} most frequent of {len(classes)}, all with --json" if len(classes) > _SHOWN else ""
    rows: dict[str, Mapping[str, int]] = {
        f"{found['objects']} objects{soft} in {found['images']} images, by geometry": found["kinds"],
        f"objects by class{most}": dict(list(classes.items())[:_SHOWN]),
        "images by number of objects": found["density"],
    }
    if check.token_lengths:
        edges = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        limit = "" if check.max_tokens is None else f" (limit {check.max_tokens})"
        title = f"samples by tokens of prompt and answer{limit}, longest {max(check.token_lengths)}"
        rows[title] = histogram(check.token_lengths, edges)
    return _bars_of(rows)


def _bars_of(groups: Mapping[str, Mapping[str, int]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "count", "", box=None)
    table.columns[1].justify = "right"
    for title, counts in groups.items():
        table.add_row(Text(title, "bold"), "", "")
        largest = max(counts.values(), default=1)
        for name, count in counts.items():
            table.add_row(Text(printable(f"  {name}")), str(count), Text("█" * max(1, round(30 * count / largest))))
    return table


def _rates(option: str, given: list[str] | None) -> dict[str, float]:
    from coordexp.data.class_list import as_written

    rates: dict[str, float] = {}
    for text in given or ():
        name, _, rate = text.rpartition("=")
        name = as_written(name)
        try:
            value = float(rate)
        except ValueError:
            value = -1.0
        if not name or not 0 <= value <= 1:
            raise ConfigError(f"{option} {text!r}: expected a name and a number from 0 to 1, e.g. {option} NAME=0.3")
        if name in rates:
            raise ConfigError(f"{option} names {name!r} twice; keep one of them")
        rates[name] = value
    return rates
