"""The ``coordexp`` command: one module per group of commands. Everything heavy is imported inside the command that
needs it, so ``--help`` is instant."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from coordexp import distributed
from coordexp.cli import evaluate, launch, predict, run, view
from coordexp.cli.data import data_app
from coordexp.cli.model import model_app
from coordexp.cli.run import config_app
from coordexp.errors import CoordExpError, RunStopped

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="coordexp",
    help="Train a vision-language model to detect objects by writing them, and teach it on its own answers.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts hold brackets, which markup would swallow
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug's plain traceback is easier to report than a decorated one
)
for _command in (
    *(run.train, run.demo, run.init, predict.predict, evaluate.evaluate, predict.export, view.view, view.replay),
    *(launch.serve, launch.launch),
):
    app.command()(_command)
app.add_typer(data_app, name="data")
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")


_flags = {"debug": False}  # options of the command as a whole; set by its callback, read when an error leaves it


def _show_version(wanted: bool) -> None:
    if wanted:
        import coordexp

        typer.echo(f"coordexp {coordexp.__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    _flags["debug"] = debug


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, 2 an error that the user can cure (no traceback), 128 + its number if a signal
    ended it: 130 for Ctrl-C. Errors of the operating system (a full disk, a file in place of a folder, a port in use)
    are the user's to cure. Any other exception is a bug and leaves with its traceback."""
    _flags["debug"] = False
    try:
        app(args=argv, prog_name="coordexp")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RunStopped as stopped:
        if distributed.is_main():
            typer.secho(str(stopped), err=True)
        sys.exit(128 + stopped.signal)
    except (CoordExpError, OSError) as error:
        if _flags["debug"]:
            raise
        text = _system_error(error) if isinstance(error, OSError) else str(error)
        typer.secho(f"error: {text}", fg=typer.colors.RED, err=True)
        sys.exit(USER_ERROR)


_FIXES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space within your quota",
    errno.EACCES: "choose a path that you may read and write",
    errno.EPERM: "choose a path that you may read and write",
    errno.EROFS: "choose a path on a disk that can be written",
    errno.EEXIST: "choose another path, or move what is there",
    errno.ENOTDIR: "a file is where a folder is needed; choose another path, or move the file",
    errno.EISDIR: "a folder is where a file is needed; name a file in it",
    errno.EADDRINUSE: "end the program that listens there, or choose another port",
}


def _system_error(error: OSError) -> str:
    """One line: path, reason, fix."""
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    fix = _FIXES.get(error.errno or 0, "coordexp --debug COMMAND shows where")
    return f"{paths}: {reason}; {fix}" if paths else f"{reason}; {fix}"
