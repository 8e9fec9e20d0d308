"""Imported first by the server that forks checks: Ctrl-C in a terminal reaches it too, and ends it without Python's
traceback, while it imports for half a minute."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
