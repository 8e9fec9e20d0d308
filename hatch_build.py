"""Build hook: the demo's files and the schema that configurations name, which live at the repository's root, go into
the wheel as ``coordexp/_assets/…``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASSETS = ("configs/demo", "configs/coordexp.schema.json", "checkpoints/demo-incomplete", "checkpoints/demo-stage1")


class DemoAssetsHook(BuildHookInterface):
    """Adds the demo's folders to wheels; an editable install finds them in the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for asset in ASSETS:
            source = Path(self.root) / asset
            if not (source.is_file() or (source.is_dir() and any(source.iterdir()))):
                raise FileNotFoundError(f"{asset}: the wheel carries it, and it is missing or empty")
            build_data["force_include"][str(source)] = f"coordexp/_assets/{asset}"
