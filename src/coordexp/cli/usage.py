"""Additions to typer: examples and headings in its help, ``--config`` as other tools spell it, and
hints for what does not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from coordexp.cli.console import echo
from coordexp.home import below_home

Function = TypeVar("Function", bound=Callable[..., Any])

# typer has no public name for the base class of its usage errors.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

# Options of other tools -> keys of the configuration.
_KEYS = {
    "lr": "learning_rate", "lr0": "learning_rate", "epochs": "num_train_epochs", "batch": "effective_batch_size",
    "batch_size": "effective_batch_size", "workers": "num_workers", "resume": "resume_from_checkpoint",
    "steps": "max_steps", "project": "output_dir",
}  # fmt: skip
# Commands that answer and do not train: a batch is of answers.
_ANSWERING = ("predict", "evaluate", "complete")


class App(typer.Typer):
    """A group of commands, each with examples in its help."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, cls=Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:  # pyright: ignore
        return super().command(name, **{"cls": Command, **settings})

    def add(self, name: str, *examples: str, section: str = "Commands", **settings: Any) -> Callable[..., Any]:
        """Decorate a function to be the command ``name``. ``section``: its heading in the group's help."""
        lines = ("\b", "Examples:" if len(examples) > 1 else "Example:", *(f"  {line}" for line in examples))
        return self.command(name, epilog="\n".join(lines), rich_help_panel=section, **settings)


class Command(TyperCommand):
    """A command that accepts ``--config FILE`` for its first argument, and has a hint for an option that is a key of
    the configuration."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        has_config = any("CONFIG" in str(parameter.metavar) for parameter in arguments)
        has_keys = any("KEY=VALUE" in str(parameter.metavar) for parameter in arguments)
        options = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        words: list[str] = []
        first: list[str] = []  # the configuration, which comes before all other arguments
        rest = iter([_below_home(word) for word in args])
        for word in rest:
            option, equals, value = word.partition("=")
            if option in options or not word.startswith("--") or word == "--":
                words.append(word)
            elif option == "--config" and has_config:
                path = value if equals else next(rest, None)
                if not path:
                    ctx.fail("Option '--config' requires an argument.")
                first.append(cast(str, path))
            elif has_keys and (keys := _keys_like(option, ctx.info_name in _ANSWERING)):
                value = value if equals else next(rest, "")
                value = value if value and not value.startswith("-") else "VALUE"
                ctx.fail(f"No such option: {option}. Write a key instead: " + " or ".join(f"{k}={value}" for k in keys))
            else:
                words.append(word)
        try:
            return super().parse_args(ctx, [*first, *words])
        except _UsageError as raised:
            error: Any = raised
            error.message = str(error.message).removeprefix("Value error, ")
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            echo(str(stop) or "interrupted", err=True)
            raise
        except EOFError as error:  # click would say no more than "Aborted!"
            raise RuntimeError(f"a file ended too early ({error}); of marshal data, delete __pycache__") from error


def _below_home(word: str) -> str:
    # Also as an option's value, which shells leave as it is.
    option, equals, value = word.partition("=")
    return f"{option}={below_home(value)}" if equals and option.startswith("--") else below_home(word)


class Group(TyperGroup):
    """Commands under headings, and a hint for one that is in another group."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as raised:
            error: Any = raised
            if found := list(_elsewhere(ctx, args[0])):
                message = str(error.message).rstrip(".").partition(". Did you mean")[0]
                error.message = f"{message}. Did you mean {' or '.join(found)}?"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels = groupby(self.commands.items(), lambda item: getattr(item[1], "rich_help_panel", None) or "Commands")
        for section, commands in panels:
            with formatter.section(section):
                formatter.write_dl([(name, command.get_short_help_str(80)) for name, command in commands])


def _elsewhere(ctx: Any, word: str) -> Iterator[str]:
    """Commands named ``word`` in any group."""
    root = ctx.find_root()
    for name, group in root.command.commands.items():
        if word in getattr(group, "commands", {}):
            yield f"{root.info_name} {name} {word}"
    if ctx is not root and word in root.command.commands:
        yield f"{root.info_name} {word}"


def _keys_like(option: str, answers: bool) -> list[str]:
    """Keys of the configuration that an option such as ``--max_steps`` means, as dotted paths; at most three."""
    from coordexp.config.base import dotted, key_paths, nearest
    from coordexp.config.schema import RunConfig

    section, _, name = option.removeprefix("--").replace("-", "_").rpartition(".")
    name = "decode_batch_size" if answers and name in ("batch", "batch_size") else _KEYS.get(name, name)
    paths = [path for path in key_paths(RunConfig) if dotted(path).startswith(section)]
    found = [path for path in paths if path[-1] == name]
    if not found and (guess := nearest(name, [str(path[-1]) for path in paths])):
        found = [path for path in paths if path[-1] == guess]
    return [dotted(path) for path in found[:3]]
