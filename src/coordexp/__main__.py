"""``python -m coordexp`` is the ``coordexp`` command."""

from coordexp.cli import main

if __name__ == "__main__":
    main()
