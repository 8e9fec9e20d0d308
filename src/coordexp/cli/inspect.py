"""``coordexp data check``, ``stats``, ``split``, ``sample``: look at a dataset, and take parts of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import check_checkpoint, counting, open_console
from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.table import Table

    from coordexp.config import RunConfig
    from coordexp.coords import CoordVocab
    from coordexp.data.check import DatasetCheck
    from coordexp.records import ImageRecord, RolloutRequest

Dataset = Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another draw.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
_SHOWN = 20
_EPOCHS = 4  # tiles of a row of --augment


def check_command(
    jsonl: Dataset,
    limit: Annotated[int | None, typer.Option(min=1, help="Check only the first N records.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer and processor count tokens and draw the sheet.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Find samples of more tokens: the run's global_max_length. Needs --model.")
    ] = None,
    sheet: Annotated[
        Path | None,
        typer.Option(help="PNG of objects drawn after serialising, tokenising and decoding them."),
    ] = None,
    augment: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml",
            help="Views as this run's data.augment makes them: a row an image, a tile an epoch.",
        ),
    ] = None,
    sheet_images: Annotated[int, typer.Option(min=1, max=100, help="Images on the sheet.")] = 12,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image: its body may be cut off.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at every line, image and object of a dataset; exit 2 if training would refuse it."""
    if max_tokens is not None and model is None:
        raise ConfigError("--max-tokens counts with a checkpoint's tokenizer and processor; name one with --model")
    if augment is not None and sheet is None:
        raise ConfigError("--augment is drawn on a sheet; name its file with --sheet")
    if model is not None:
        check_checkpoint(model)
    run = None if augment is None else _augmented_run(augment)
    from coordexp.data.check import check_jsonl

    count_tokens = None
    if model is not None:
        from coordexp.data import read_jsonl
        from coordexp.modeling.inputs import token_counter

        count_tokens = token_counter(model, read_jsonl(jsonl, limit=1, check_images=True)[0])
    with counting("checking") as progress:
        check = check_jsonl(
            jsonl, limit=limit, count_tokens=count_tokens, max_tokens=max_tokens, deep=deep, progress=progress
        )
    if sheet is not None:
        _draw_sheet(check, model, sheet, sheet_images, run)
    if as_json:
        typer.echo(json.dumps(check.to_json(), ensure_ascii=False))
    else:
        console = open_console()
        console.print(_findings(check))
        console.print(_histograms(check))
        if sheet is not None:
            console.print(f"wrote {sheet}", soft_wrap=True)
    if check.errors:
        first = next(problem for problem in check.problems if problem.finding in _errors())
        raise DataError(
            f"{check.errors} findings that training refuses; the first: {first.where}: {first.finding}: {first.detail}",
            path=jsonl,
        )


def stats_command(jsonl: Dataset, as_json: AsJson = False) -> None:
    """Classes, geometries, densities and box sizes of a sound dataset."""
    from coordexp.data.check import DatasetCheck, histogram
    from coordexp.data.jsonl import read_jsonl
    from coordexp.geometry import aabb

    check = DatasetCheck(jsonl, records=read_jsonl(jsonl))
    boxes = [aabb(obj) for record in check.records for obj in record.objects]
    sides = [round(((x2 - x1) * (y2 - y1)) ** 0.5 / 9.99) for x1, y1, x2, y2 in boxes]
    sizes = histogram(sides, (0, 2, 5, 10, 20, 40, 60, 80, 100))
    if as_json:
        fields = check.to_json()
        kept = {
            name: fields[name] for name in ("path", "images", "objects", "soft_objects", "classes", "kinds", "density")
        }
        typer.echo(json.dumps({**kept, "size_percent": sizes}, ensure_ascii=False))
        return
    console = open_console()
    console.print(_histograms(check))
    console.print(_bars("objects by size: square root of their box's share of the image, %", sizes))


def split_command(
    jsonl: Dataset,
    shares: Annotated[str, typer.Option(help="Names and shares, which sum to 1.")] = "train=0.8,val=0.1,test=0.1",
    seed: Seed = 0,
) -> None:
    """Split a dataset into NAME.train.jsonl, NAME.val.jsonl, … beside it; records of one image stay together."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.subset import split_records, write_part

    wanted = _shares(shares)
    parts = split_records(read_jsonl(jsonl), list(wanted.values()), seed)
    paths = [jsonl.with_name(f"{jsonl.stem}.{name}.jsonl") for name in wanted]
    for path in paths:
        if path.exists():
            raise DataError("exists already; remove it, or move it away", path=path)
    for path, part in zip(paths, parts, strict=True):
        typer.echo(f"wrote {write_part(part, path)}: {len(part)} records")


def sample_command(
    jsonl: Dataset,
    count: Annotated[int, typer.Option(min=1, help="Number of records.")],
    out: Annotated[Path, typer.Option(help="The new JSONL; its images stay where they are.")],
    seed: Seed = 0,
) -> None:
    """Draw records at random."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.subset import sample_records, write_part

    typer.echo(f"wrote {write_part(sample_records(read_jsonl(jsonl), count, seed), out)}: {count} records")


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            value = 0.0
        if not name.isidentifier() or value <= 0 or name in shares:
            raise ConfigError(f"--shares {text!r}: expected names and shares, e.g. train=0.9,val=0.1")
        shares[name] = value
    return shares


def _augmented_run(path: Path) -> RunConfig:
    from coordexp.config import load_config

    run = load_config(path)
    if run.data.augment is None:
        raise ConfigError(f"{path}: has no section data.augment, so there is nothing to draw with --augment")
    return run


def _draw_sheet(check: DatasetCheck, model: Path | None, sheet: Path, count: int, run: RunConfig | None) -> None:
    """Also compares every record with what comes back, which is what the picture is for."""
    from coordexp.cli.console import vocabulary_of
    from coordexp.data.check import Finding
    from coordexp.data.files import asset
    from coordexp.evaluation.drawing import draw_contact_sheet, round_trip

    vocab = vocabulary_of(asset("checkpoints/demo-stage1") if model is None else model)
    for record in check.records:
        if round_trip(record.objects, vocab) != list(record.objects):
            check.add(Finding.ROUND_TRIP, record.sample_id, "the objects read back from its tokens are others")
    broken = {problem.where for problem in check.problems if problem.finding in _errors()}
    sound = [record for record in check.records if record.sample_id not in broken]
    if not sound:
        raise DataError("no sound record to draw", path=check.path)
    if run is not None:
        _draw_views(sound, vocab, sheet, count, run)
        return
    step = max(1, len(sound) // count)
    draw_contact_sheet(sound[::step][:count], vocab, sheet)


def _draw_views(sound: Sequence[ImageRecord], vocab: CoordVocab, sheet: Path, count: int, run: RunConfig) -> None:
    """Some records as the run's first epochs see them."""
    from coordexp.data.dataset import RecordDataset
    from coordexp.evaluation.drawing import draw_contact_sheet

    def unasked(record: ImageRecord) -> RolloutRequest:
        raise AssertionError(f"{record.sample_id}: views are drawn without prompts")

    seen = RecordDataset(sound, unasked, run.custom.object_ordering, run.training.seed, run.data.augment)
    rows = max(1, count // _EPOCHS)
    step = max(1, len(sound) // rows)
    views = [seen.view(index, epoch) for index in list(range(0, len(sound), step))[:rows] for epoch in range(_EPOCHS)]
    draw_contact_sheet([record for record, _ in views], vocab, sheet, _EPOCHS, [image for _, image in views])


def _errors() -> frozenset[object]:
    from coordexp.data.check import ERRORS

    return frozenset(ERRORS)


def _findings(check: DatasetCheck) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("finding", "count", "where", title=Text(str(check.path)), title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("lines", str(check.lines), f"{len(check.records)} of them sound records")
    for finding, count in sorted(check.counts().items(), key=lambda item: (item[0] not in _errors(), item[0])):
        table.add_section()
        style = "red" if finding in _errors() else ""
        for k, problem in enumerate([problem for problem in check.problems if problem.finding is finding][:_SHOWN]):
            table.add_row(
                Text(finding.value if k == 0 else "", style),
                str(count) if k == 0 else "",
                Text(f"{problem.where}: {problem.detail}"),  # a Text: a class may be called "[red] car"
            )
        if count > _SHOWN:
            table.add_row("", "", f"… and {count - _SHOWN} more; all with --json")
    return table


def _histograms(check: DatasetCheck) -> Table:
    from coordexp.data.check import histogram

    objects = sum(len(record.objects) for record in check.records)
    soft = f" ({check.soft_objects()} of them soft)" if check.soft_objects() else ""
    rows: dict[str, Mapping[str, int]] = {
        f"{objects} objects{soft} in {len(check.records)} images, by geometry": check.kinds(),
        "objects by class": dict(check.classes().most_common(_SHOWN)),
        "images by number of objects": check.densities(),
    }
    if check.token_lengths:
        edges = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        limit = "" if check.max_tokens is None else f" (limit {check.max_tokens})"
        title = f"samples by tokens of prompt and answer{limit}, longest {max(check.token_lengths)}"
        rows[title] = histogram(check.token_lengths, edges)
    return _bars_of(rows)


def _bars(title: str, counts: Mapping[str, int]) -> Table:
    return _bars_of({title: counts})


def _bars_of(groups: Mapping[str, Mapping[str, int]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "count", "", box=None)
    table.columns[1].justify = "right"
    for title, counts in groups.items():
        table.add_row(Text(title, "bold"), "", "")
        largest = max(counts.values(), default=1)
        for name, count in counts.items():
            table.add_row(Text(f"  {name}"), str(count), Text("█" * max(1, round(30 * count / largest))))
    return table
