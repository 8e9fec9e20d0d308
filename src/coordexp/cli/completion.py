"""``coordexp data drop``, ``complete``: take annotations away, and add what a model finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coordexp.data.drop import DropCounts, ObjectSize

Dataset = Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="The dataset.")]
Out = Annotated[Path, typer.Option(help="The new JSONL; its images stay where they are.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what --out names, if it is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the counts as JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command("drop")(drop_command)


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
    from coordexp.data.write import write_jsonl

    _refuse_existing(out, overwrite)
    if soft:
        if keep is not None or per_class or per_size or allow_empty:
            raise ConfigError("--soft takes away soft objects and nothing else; leave out the other options")
        from coordexp.data.drop import without_soft

        left, gone = without_soft(read_jsonl(jsonl))
        write_jsonl(left, out)
        annotated = sum(len(record.objects) for record in left)
        fields = {"images": len(left), "kept": annotated, "dropped": gone}
        typer.echo(json.dumps(fields) if as_json else f"wrote {out}: {gone} soft objects left out, {annotated} others")
        return
    from coordexp.data.drop import DropRates, drop_annotations

    rates = DropRates(1.0 if keep is None else keep, _rates("--per-class", per_class), _sizes(per_size), allow_empty)
    records, counts = drop_annotations(read_jsonl(jsonl), rates, seed)
    write_jsonl(records, out)
    typer.echo(json.dumps(counts.to_json(), ensure_ascii=False) if as_json else _drop_text(counts, out))


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
    from coordexp.data.drop import SIZES

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
