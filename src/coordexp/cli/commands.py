"""The commands of ``coordexp``: one module per group. Everything heavy is imported inside the command that needs it, so
``--help`` is instant."""

from __future__ import annotations

import errno
import io
import logging
import re
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Annotated, Any

import typer

from coordexp import distributed
from coordexp.cli import doctor, evaluate, launch, predict, view
from coordexp.cli import train as runs
from coordexp.cli.console import echo
from coordexp.cli.data import data_app
from coordexp.cli.model import model_app
from coordexp.cli.train import config_app
from coordexp.cli.usage import App
from coordexp.errors import CoordExpError, RunFinished, RunStopped, shortened
from coordexp.out_of_memory import describe
from coordexp.printable import PrintableFilter

USER_ERROR = 2

app = App(
    "Train Qwen3-VL as an object detector, and keep training it on its own answers.\n\n"
    "Start here: coordexp demo (ten minutes on a CPU). With your own data:\n\n"
    "\b\n"
    "  coordexp data convert voc path/to/VOC --out data/mine --split train\n"
    "  coordexp model expand-vocab Qwen/Qwen3-VL-2B-Instruct checkpoints/start\n"
    "  coordexp init data/mine --model checkpoints/start\n"
    "  coordexp train stage1.yaml\n"
    "  coordexp predict photos --model outputs/stage1 --save-images\n\n"
    "Manual: docs/quickstart.md in the repository. Help of a command: coordexp COMMAND --help.",
    name="coordexp",
    rich_markup_mode=None,  # help texts hold brackets, which markup would swallow
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug's plain traceback is easier to report than a decorated one
)
_TRAIN, _USE, _DATA, _ROLLOUTS = "Train", "Use a model", "Data, models, configurations", "Rollouts"
_MACHINE = "This machine"
app.add("demo", "coordexp demo", section=_TRAIN)(runs.demo)
app.add(
    "init",
    "coordexp init data/mine --model checkpoints/start",
    "coordexp init data/mine --model outputs/stage1 --stage 2",
    section=_TRAIN,
)(runs.init)
app.add(
    "train",
    "coordexp train stage1.yaml",
    "coordexp train stage1.yaml training.max_steps=3 training.output_dir=outputs/try",
    "torchrun --nproc_per_node=8 -m coordexp train stage1.yaml",
    section=_TRAIN,
)(runs.train)
app.add(
    "predict",
    "coordexp predict photos --model outputs/stage1 --save-images",
    "coordexp predict photos 'frames/*.png' --model outputs/stage1 --out outputs/answers --classes cat,dog",
    "coordexp predict photos --model outputs/stage1 --answers 8 --min-confidence 0.3",
    section=_USE,
)(predict.predict)
app.add(
    "evaluate",
    "coordexp evaluate --model outputs/stage1 --data data/mine/val.jsonl",
    "coordexp evaluate stage1.yaml --model outputs/stage1",
    "coordexp evaluate --compare outputs/stage1 outputs/stage2",
    section=_USE,
)(evaluate.evaluate)
app.add(
    "export",
    "coordexp export coco outputs/predict --out exported",
    "coordexp export yolo outputs/predict --out labels --classes data.yaml --scores",
    section=_USE,
)(predict.export)
app.add(
    "view",
    "coordexp view outputs/stage2 --out view.html",
    "coordexp view outputs/predict --serve",
    section=_USE,
)(view.view)
app.add_typer(data_app, name="data", rich_help_panel=_DATA)
app.add_typer(model_app, name="model", rich_help_panel=_DATA)
app.add_typer(config_app, name="config", rich_help_panel=_DATA)
app.add(
    "launch",
    "coordexp launch configs/stage2_rollout_aligned/server_3v1.yaml --dry-run",
    "coordexp launch configs/stage2_rollout_aligned/server_multi_node.yaml --for slurm --learner-nodes 2 > job.sbatch",
    section=_ROLLOUTS,
)(launch.launch)
app.add("serve", "coordexp serve configs/stage2_rollout_aligned/server.yaml --index 0", section=_ROLLOUTS)(launch.serve)
app.add(
    "replay",
    "coordexp replay outputs/stage2/rollout_records --limit 10",
    "coordexp replay stage2.yaml outputs/stage2/rollout_records --model outputs/stage2",
    section=_ROLLOUTS,
)(view.replay)
app.add(
    "doctor",
    "coordexp doctor",
    "coordexp doctor --model checkpoints/start --json doctor.json",
    "coordexp doctor --gpus 2 --only exactness --only pushes --keep doctor",
    section=_MACHINE,
)(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        import coordexp

        echo(f"coordexp {coordexp.__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; of any command.")] = False,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """``--debug`` is taken by :func:`run`, at any place of the command line; it is declared here for the help."""


@cache
def whole_command() -> Any:
    """``coordexp`` with all of its commands, which typer takes a tenth of a second to build."""
    return typer.main.get_command(app)


def run(words: list[str]) -> None:
    """What :func:`coordexp.cli.main` does once everything is imported."""
    logger = logging.getLogger("coordexp")
    if not any(isinstance(one, PrintableFilter) for one in logger.filters):
        logger.addFilter(PrintableFilter())
    for stream in (sys.stdout, sys.stderr):  # of a terminal that cannot show every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in words
    try:
        distributed.rank()
    except CoordExpError as error:  # apart, as the handlers below ask for the rank
        echo(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(USER_ERROR)
    try:
        with _unwound_by_signals():
            whole_command()(args=[word for word in words if word != "--debug"], prog_name="coordexp")
    except RunStopped as stopped:
        if distributed.is_main():
            echo(str(stopped), err=True)
        sys.exit(128 + stopped.signal)
    except RunFinished as finished:
        if distributed.is_main():
            echo(str(finished))
        sys.exit()
    except Exception as error:
        distributed.first_rank_prints(error)
        shortage = describe(error, distributed.rank() if distributed.world_size() > 1 else None)
        name = _name_without_text(error)
        if debug or (shortage is None and name is None and not isinstance(error, (CoordExpError, OSError))):
            raise
        text = _system_error(error) if shortage is None and isinstance(error, OSError) else str(shortage or error)
        if name is not None:
            text = f"{name}: a name that is not UTF-8, which no file that is written here can hold; rename it"
        echo(f"error: {text}", fg=typer.colors.RED, err=True)
        sys.exit(USER_ERROR)


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, which removes its temporary folders, where nothing else handles it. A
    rank ends at once: it may be waiting for the others, and runs no handler meanwhile."""
    theirs = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    alone = distributed.world_size() == 1 and threading.current_thread() is threading.main_thread()
    ours = [number for number, default in theirs.items() if alone and signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, theirs[number])


def _unwind(number: int, frame: FrameType | None) -> None:
    # Python drops what is raised while it finalizes an object: a Ctrl-C that comes during a garbage collection is
    # handled in the first __del__. It is then handled once more in a moment; a timer of the system takes no locks.
    here = frame
    while here is not None:
        if here.f_code.co_name == "__del__" or here.f_code.co_filename in _OF_WEAK_REFERENCES:
            signal.signal(signal.SIGALRM, lambda _, later: _unwind(number, later))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        here = here.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


_AGAIN_S = 0.02
_OF_WEAK_REFERENCES = {one.__init__.__code__.co_filename for one in (weakref.WeakValueDictionary, weakref.WeakSet)}


_FIXES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space within your quota",
    errno.EACCES: "choose a path that you may read and write",
    errno.EPERM: "choose a path that you may read and write",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f), or choose another disk",
    errno.ELOOP: "remove the link that leads to itself",
    errno.EROFS: "choose a path on a disk that can be written",
    errno.EEXIST: "choose another path, or move what is there",
    errno.ENOTDIR: "a file is where a folder is needed; choose another path, or move the file",
    errno.EISDIR: "a folder is where a file is needed; name a file in it",
    errno.EADDRINUSE: "end the program that listens there, or choose another port",
}


def _system_error(error: OSError) -> str:
    """One line: path, reason, fix."""
    paths = " -> ".join(shortened(str(path)) for path in (error.filename, error.filename2) if path is not None)
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    fix = _FIXES.get(error.errno or 0, "coordexp --debug COMMAND shows where")
    notes = getattr(error, "__notes__", ())  # how to continue
    return (f"{paths}: " if paths else "") + "; ".join([reason, fix, *notes])


def _name_without_text(error: Exception) -> str | None:
    # Python reads bytes of a name that are not UTF-8 as halves of characters, which JSON and YAML cannot hold.
    if not isinstance(error, UnicodeEncodeError) or not 0xDC80 <= ord(error.object[error.start]) <= 0xDCFF:
        return None
    before, after = error.object[: error.start], error.object[error.start :]
    return re.split(r'["\n]', before)[-1] + re.split(r'["\n]', after)[0]
