"""The run that a checkpoint comes from, as far as its folder tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordexp.config.source import read_document

RESOLVED_CONFIG = "resolved_config.yaml"


def settings_of_run(checkpoint: Path) -> Mapping[str, Any]:
    """The configuration of the run that wrote ``checkpoint``: beside it, or in the folder above; empty where there is
    none.

    Raises:
        ConfigError: the file is no YAML.
    """
    for place in (checkpoint, checkpoint.absolute().parent):
        if (place / RESOLVED_CONFIG).is_file():
            return read_document(place / RESOLVED_CONFIG).data
    return {}
