"""Build hooks: the shipped configurations with their schema, and the demo's checkpoints, which live at the
repository's root, go into the wheel as ``coordexp/_assets/…``; and the README goes into the package's metadata in a
form that can be read away from the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ASSETS = ("configs", "checkpoints/demo-incomplete", "checkpoints/demo-stage1")
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


class DemoAssetsHook(BuildHookInterface):
    """Adds these folders to wheels; an editable install finds them in the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for asset in ASSETS:
            source = Path(self.root) / asset
            if not (source.is_file() or (source.is_dir() and any(source.iterdir()))):
                raise FileNotFoundError(f"{asset}: the wheel carries it, and it is missing or empty")
            build_data["force_include"][str(source)] = f"coordexp/_assets/{asset}"


class LongDescriptionHook(MetadataHookInterface):
    """Makes the README the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def long_description(readme: str, repository: str | None) -> str:
    """``readme`` without links relative to the repository, which lead nowhere from a package index: they lead to
    ``repository``, a URL as GitHub forms them. Without one a picture's place is taken by its description, and a link is
    its text."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.group("picture", "text", "target")
        if "://" in target or target.startswith("#"):
            return link.group()
        if repository is None:
            return f"*(picture: {text})*" if picture else text
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return _LINK.sub(absolute, readme)
