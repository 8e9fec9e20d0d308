"""The ``coordexp`` command. :mod:`coordexp.cli.commands` has its commands, and imports them in tenths of a second."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, or nothing left to do; 2 an error that the user can cure (no traceback); 128 +
    its number if a signal ended it: 130 for Ctrl-C. Errors of the operating system (a full disk, a file in place of a
    folder, a port in use) and memory that ran out, whichever library reports it, are the user's to cure. Any other
    exception is a bug and leaves with its traceback."""
    try:
        from coordexp.cli.commands import run
        from coordexp.heavy_imports import process_is_a_command

        process_is_a_command()
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also while commands are imported
        sys.exit(INTERRUPTED)
