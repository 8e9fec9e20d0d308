"""The README as a package index shows it: no picture and no link is broken there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@pytest.fixture
def long_description(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    from hatch_build import long_description

    return long_description


def test_the_metadata_has_no_relative_links_and_every_picture_or_its_description() -> None:
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.readme_content_type == "text/markdown"
    assert [target for _, _, target in LINK.findall(core.readme) if "://" not in target] == []
    pictures = [text for mark, text, _ in LINK.findall(README) if mark]
    assert len(pictures) >= 2
    assert [text for text in pictures if text not in core.readme] == []


def test_with_a_repository_links_are_absolute(long_description) -> None:
    found = LINK.findall(long_description(README, "https://example.org/coordexp/"))
    for (mark, text, target), (mark_before, text_before, before) in zip(found, LINK.findall(README), strict=True):
        assert (mark, text) == (mark_before, text_before)
        assert target == f"https://example.org/coordexp/{'raw' if mark else 'blob'}/HEAD/{before}"
        assert (ROOT / before).exists(), before
