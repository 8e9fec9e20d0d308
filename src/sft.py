"""``python -m src.sft --config X.yaml``, from the repository's root: the same as ``coordexp train X.yaml``."""

from __future__ import annotations

import argparse

from coordexp.cli import main as coordexp_main


def main(argv: list[str] | None = None) -> None:
    """Read ``--config`` and hand over; exit codes are those of ``coordexp``."""
    parser = argparse.ArgumentParser(prog="python -m src.sft", description="Train as a YAML configuration says.")
    parser.add_argument("--config", required=True, metavar="CONFIG.yaml", help="the run's configuration")
    coordexp_main(["train", parser.parse_args(argv).config])


if __name__ == "__main__":
    main()
