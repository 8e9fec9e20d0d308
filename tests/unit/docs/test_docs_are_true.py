"""Commands, configurations, links and generated pages of the documentation are valid, and so is the README."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer import _click as click  # the base of its commands

from coordexp.cli.commands import whole_command
from coordexp.config import RunConfig
from coordexp.data.convert.report import Note, SkipReason

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(language: str, pages: Sequence[Path] = PAGES) -> Iterator[tuple[Path, str]]:
    for page in pages:
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page, text


def commands() -> list[tuple[str, str]]:
    """``coordexp …`` lines of shell blocks without comments and ``> FILE``, also under torchrun; the README's too."""
    found = blocks("bash", [*PAGES, ROOT / "README.md"])
    lines = [(page.name, re.split(" [#>] ?", line)[0].strip()) for page, text in found for line in text.splitlines()]
    lines = [
        (page, re.sub(r"^torchrun .*-m (?=coordexp )", "", line).removeprefix(".venv/bin/")) for page, line in lines
    ]
    return [(page, line) for page, line in lines if line.startswith("coordexp ")]


@pytest.mark.parametrize(
    "script",
    [
        "generate_config_reference.py",
        "generate_cli_reference.py",
        "generate_metrics.py",
        "generate_gpu.py",
        "draw_architecture.py",
        "draw_forced_tokens.py",
        "draw_matching.py",
        "pictures.py",
    ],
)
def test_generated_page_is_current(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    monkeypatch.syspath_prepend(str(DOCS))
    try:
        runpy.run_path(str(DOCS / script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code


def parse_error(line: str) -> str | None:
    command = whole_command()
    words = shlex.split(line)[1:]
    context = click.Context(command, info_name="coordexp")
    while hasattr(command, "get_command"):
        name = words.pop(0)
        command = command.get_command(context, name)
        if command is None:
            return f"unknown command {name!r}"
        context = click.Context(command, info_name=name, parent=context)
    try:
        command.parse_args(context, words)
    except click.ClickException as error:
        return error.format_message()
    keys = [word.split("=")[0] for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    unknown = [key for key in keys if not is_key(RunConfig, key)]
    return f"unknown keys {unknown}" if unknown else None


def is_key(section: Any, path: str) -> bool:
    """Whether a dotted path names a key of the configuration."""
    name, _, rest = path.partition(".")
    if name not in section.model_fields:
        return False
    annotation = section.model_fields[name].annotation
    inner = [one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields")]
    return not rest or any(is_key(one, rest) for one in inner)


def test_every_documented_command_parses() -> None:
    assert len(commands()) >= 10
    assert {f"{page}: {line}": error for page, line in commands() if (error := parse_error(line)) is not None} == {}


def test_python_blocks_compile() -> None:
    found = list(blocks("python"))
    assert found
    for page, text in found:
        compile(text.replace("{…, ", "{"), str(page), "exec")


def test_the_example_module_runs() -> None:
    """Without focusing it is the cross-entropy of the closing brace and the end of the turn."""
    from coordexp.objective.pipeline import ObjectivePipeline, WeightedModule
    from coordexp.records import TokenRole
    from support.objective_rows import Trigram, scores_of, segments

    (source,) = [text for page, text in blocks("python") if "class StopFocal:" in text]
    namespace: dict[str, Any] = {"__name__": "stop_focal_example"}
    sys.modules["stop_focal_example"] = types.ModuleType("stop_focal_example")  # dataclasses look their module up
    try:
        exec(compile(source, "add-a-module.md", "exec", dont_inherit=True), namespace)
    finally:
        del sys.modules["stop_focal_example"]
    row = []
    for segment in segments():
        ends_T = np.isin(segment.target.roles_T, (TokenRole.CLOSE, TokenRole.EOS)).astype(np.float32)
        target = replace(segment.target, weights={**segment.target.weights, "stop": ends_T})
        row.append(replace(segment, target=target))
    focal = namespace["StopFocal"](focal_weight=0.5, gamma=0.0)
    supervision, scores = scores_of(row, Trigram(), ObjectivePipeline((WeightedModule("stop_focal", 1.0, focal),)))
    ends_N = supervision.weight_N("stop") > 0
    assert ends_N.sum() == 2 * len(row)
    want = 0.5 * scores.cross_entropy_N()[ends_N].sum().item()
    assert focal.sums(supervision, scores)["focal"].item() == pytest.approx(want)


def test_every_guarantee_names_tests_that_exist() -> None:
    """A name without a folder is of ``tests/faults``."""
    named = set(re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", (DOCS / "reliability.md").read_text()))
    missing = [name for name in named if not (ROOT / ("" if "/" in name else "tests/faults") / name).is_file()]
    assert len(named) > 20 and not missing, missing


@pytest.mark.parametrize("kind", [SkipReason, Note])
def test_every_reason_of_a_conversion_report_is_described(kind: type[StrEnum]) -> None:
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    assert [reason.value for reason in kind if f"`{reason.value}`" not in page] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {name for _, text in blocks("bash") for name in re.findall(r"^make (\w+)", text, re.M)}
    assert named
    for name in named:
        assert re.search(rf"^{name}:", makefile, re.M), f"make {name}"


# --- the README as a package index shows it ---

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
