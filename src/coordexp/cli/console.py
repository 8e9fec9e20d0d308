"""Shared by commands: consoles, progress, options from dataclasses, and a checkpoint's tokenizer without torch."""

from __future__ import annotations

import inspect
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from coordexp.errors import DISK_FULL, ConfigError, CoordExpError, DataError
from coordexp.heavy_imports import heavy_imports
from coordexp.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.coords import CoordVocab
    from coordexp.records import ImageRecord

# Options of commands that write a dataset.
Out = Annotated[Path, typer.Option(help="The new JSONL; its images stay where they are.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what --out names, if it is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]


def open_console(stderr: bool = False) -> Console:
    """A console of the first rank, silent on others. Prints text literally: use ``rich.text.Text`` for style."""
    from coordexp import distributed
    from coordexp.data.progress_bar import literal_console

    return literal_console(stderr=stderr, quiet=not distributed.is_main())


def echo(text: object = "", *, dim: str = "", err: bool = False, nl: bool = True, fg: str | None = None) -> None:
    """Print ``text`` as :func:`~coordexp.printable.printable`; JSON reads back the same. ``dim``: appended in a faint
    colour; ``nl``: with a line break at the end; ``fg``: colour of ``text``."""
    styled = typer.style(printable(text, lines=True), fg=fg) if fg else printable(text, lines=True)
    typer.echo(styled + (typer.style(printable(dim), dim=True) if dim else ""), err=err, nl=nl)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take options as dataclasses, whose fields have defaults and are annotated as typer's options. In
    the signature, which typer reads, the fields replace the parameter, after all others."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=keyword)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name not in groups
    ]
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=types[field.name])
            for field in fields(group)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return run


def no_bars_in_log_files(*, nor_on_terminals: bool = False) -> None:
    """Disable transformers' progress bars unless stderr is a terminal, or there too."""
    if nor_on_terminals or sys.stderr is None or not sys.stderr.isatty():  # None: it was closed
        with heavy_imports():
            from transformers.utils import logging

        logging.disable_progress_bar()


@contextmanager
def on_interrupt(message: str | Callable[[], str]) -> Iterator[None]:
    """Say after Ctrl-C or SIGTERM, and with the error of a full disk, what there is now, and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            error.add_note(message if isinstance(message, str) else message())
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != 128 + signal.SIGTERM:
            raise
        text = message if isinstance(message, str) else message()
        if isinstance(end, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted: {text}") from None
        echo(f"ended by SIGTERM: {text}", err=True)
        raise


def counting(description: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A progress bar on stderr for work on images; yields its callback."""
    from coordexp.data.progress_bar import reporting

    return reporting(open_console(stderr=True), description)


def refuse_idle(option: str, is_idle: object, belongs: str) -> None:
    """Raise ConfigError if an option is given that does nothing here, which is a misunderstanding. ``belongs``: a
    predicate that says where it does."""
    if is_idle:
        raise ConfigError(f"{option} has no use here; it {belongs}")


def refuse_filled(folder: Path, otherwise: str = "") -> None:
    """Raise DataError if the folder is not empty (``otherwise``: another way out of that) or cannot be written to."""
    from coordexp.data.files import check_writable

    check_writable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(", ".join(["the folder is not empty; name a new one", *filter(None, [otherwise])]), path=folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """For a command that fills a folder: refused as by :func:`refuse_filled`. An error, a full disk or Ctrl-C removes
    what was written, so that no part of a checkpoint is taken for a whole one, and the same command can be repeated."""
    from coordexp.data.files import naming

    refuse_filled(folder)
    was_there = folder.is_dir()
    try:
        with naming(folder):
            yield
    except BaseException:  # Ctrl-C too
        for written in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(written) if written.is_dir() and not written.is_symlink() else written.unlink()
        if folder.is_dir() and not was_there:
            folder.rmdir()
        raise


def check_checkpoint(model: Path, *, has_base: bool = True) -> Path:
    """The folder of a Qwen3-VL checkpoint, before torch is imported; a model of the hub is fetched. ``has_base``: False
    for adapters whose base is somewhere else now. Raises CheckpointError for anything else."""
    from coordexp.checkpoints.fetch import model_folder
    from coordexp.checkpoints.folder import Checkpoint

    if has_base or not model.is_dir():
        model = model_folder(model)
        Checkpoint.open(model)
    return model


def checked_inputs(
    model: str | Path, datasets: Iterable[tuple[Path | None, int | None]]
) -> tuple[Checkpoint, dict[tuple[Path, int | None], Sequence[ImageRecord]]]:
    """Check without torch the checkpoint's small files, and every line and image of the datasets (path and maximum
    number of records). Returns both as they were opened. Raises all problems at once."""
    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.data.dataset_cache import check_images, open_records

    problems: list[CoordExpError] = []
    opened: Checkpoint | None = None
    records: dict[tuple[Path, int | None], Sequence[ImageRecord]] = {}
    try:
        if (opened := Checkpoint.open(model)).has_tokenizer_file:
            opened.read_vocab()
    except CoordExpError as error:
        problems.append(error)
    for path, limit in datasets:
        try:
            if path is not None:
                records[path, limit] = open_records(path, limit=limit)
                check_images(records[path, limit])
        except CoordExpError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    assert opened is not None
    return opened, records


def written_file(path: Path | None) -> Path | None:
    """The path of one file to write, as an option names it, checked."""
    if path is not None:
        from coordexp.data.files import check_own_file

        check_own_file(path)
    return path


def picture(path: Path | None) -> Path | None:
    """As :func:`written_file`, for a picture."""
    if path is not None:
        from coordexp.data.files import check_picture

        check_picture(path)
    return path


def say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def say_written(console: Console, files: Sequence[Path], most: int = 8) -> None:
    """Print the files that were written; of many only the first ones."""
    if len(files) > most:
        say(console, f"wrote {', '.join(str(path) for path in files[: most - 1])} and {len(files) - most + 1} more")
    elif files:
        say(console, f"wrote {', '.join(str(path) for path in files)}")


def vocabulary_of(checkpoint: Path) -> CoordVocab:
    """The coordinate vocabulary of a checkpoint, without torch if its files allow."""
    from coordexp.checkpoints.folder import Checkpoint

    opened = Checkpoint.open(checkpoint)
    if opened.has_tokenizer_file:
        return opened.read_vocab()
    with heavy_imports():  # vocab.json alone needs transformers
        from coordexp.modeling.load import load_vocab

    return load_vocab(opened)
