"""The ``coordexp`` command. :mod:`coordexp.cli.commands` has its commands, and imports them in tenths of a second."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress

INTERRUPTED = 130
_UNEXPECTED = 1  # Python's own code of an exception that nothing caught
_ended: list[int] = []  # exit codes of commands of this process


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, or nothing left to do; 2 an error that the user can cure (no traceback); 128 +
    its number if a signal ended it: 130 for Ctrl-C. Errors of the operating system (a full disk, a file in place of a
    folder, a port in use) and memory that ran out, whichever library reports it, are the user's to cure. Any other
    exception is a bug and leaves with its traceback."""
    code = _UNEXPECTED
    _open_standard_streams()
    try:
        from coordexp.cli.commands import run
        from coordexp.heavy_imports import process_is_a_command

        process_is_a_command()
        run(sys.argv[1:] if argv is None else argv)
        code = 0
    except KeyboardInterrupt:  # also while commands are imported
        code = INTERRUPTED
        sys.exit(code)
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else _UNEXPECTED
        raise
    finally:
        _ended.append(code)


def _open_standard_streams() -> None:
    """Point those of descriptors 0 to 2 that the caller closed (``>&-``) to ``/dev/null``: the next file or pipe would
    get the number, and what libraries and other processes print would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


@atexit.register  # before any other module's function, so it runs after all of them
def _end_rank() -> None:
    """End a command that is one of several ranks before the interpreter is taken down.

    A thread of gloo may still hold the tensors of the last message between ranks. If it lets go of them while the
    interpreter is taken down, it aborts the process (exit code -6), and torchrun ends the other ranks. Destroying the
    process group does not end these threads: FSDP's meshes hold it too.
    """
    distributed = sys.modules.get("torch.distributed")
    if _ended and distributed is not None and distributed.is_available() and distributed.is_initialized():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has ended
                stream.flush()
        os._exit(_ended[-1])
