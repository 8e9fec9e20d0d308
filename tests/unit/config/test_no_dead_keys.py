"""A key that is accepted is a key that is read: somewhere in the program outside ``coordexp.config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from coordexp.config import RunConfig
from coordexp.config.debug import DEBUG_STANDS_FOR
from support.config_reads import Reads, models_of, sections

SOURCE = Path(__file__).parents[3] / "src"
SECTIONS = sections(RunConfig)

# Keys whose whole effect is on the configuration itself.
SETTLED_WHILE_LOADING = {
    ("DebugConfig", "enabled"): "decides whether the section's other keys stand for those of other sections",
    **{("DebugConfig", key): f"stands for {'.'.join(target)}" for key, target in DEBUG_STANDS_FOR.items()},
    ("TrainingConfig", "packing_drop_last"): "must be true with packing, and says nothing without",
    ("SyncConfig", "mode"): "auto is replaced while loading; the rest of the program reads settled_mode",
}


def leaves() -> set[tuple[str, str]]:
    """(section, key) of every key that holds a value rather than a section, and that can hold more than one."""
    return {
        (name, key)
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
        if not models_of(field.annotation) and not _single(field.annotation)
    }


def _single(annotation: Any) -> bool:
    """``Literal[True]``: the key documents what the program does, and there is nothing to choose."""
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def program() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if SOURCE / "coordexp" / "config" not in path.parents]


def test_every_key_is_read_by_the_program() -> None:
    unread = leaves() - Reads(SECTIONS, program()).found - set(SETTLED_WHILE_LOADING)
    assert sorted(".".join(pair) for pair in unread) == []


PROGRAM = """
from dataclasses import dataclass
from coordexp.config import RunConfig, TunerConfig
from coordexp.config.objective import ModuleSpec

@dataclass
class Run:
    config: RunConfig

class Part:
    def __init__(self, tuner: TunerConfig) -> None:
        self.tuner = tuner

    def rank(self) -> int:
        return self.tuner.lora_rank

def start(run: Run, specs: list[ModuleSpec]) -> None:
    config, training = run.config, run.config.training
    part = Part(config.tuner)
    print(part.tuner.lora_alpha, training.hf_arguments(2))
    for server in config.rollout_matching.vllm.server.servers:
        print(f"{server.base_url}")
    weights = [spec.weight for spec in specs if spec.enabled]
    print(weights, config.rollout_matching.repeat_terminate.model_dump_json())
    other.lora_dropout = enabled = 3
"""

# (section, key, is it read in the program above?)
CASES = [
    ("TunerConfig", "lora_rank", True),  # an attribute set in __init__
    ("TunerConfig", "lora_alpha", True),  # through a local object
    ("TunerConfig", "lora_dropout", False),  # of something else
    ("ServerEntry", "base_url", True),  # in a loop and an f-string
    ("ServerEntry", "group_port", False),
    ("BBoxGeoSpec", "weight", True),  # in a comprehension, through an alias
    ("BBoxGeoSpec", "enabled", True),
    ("BBoxGeoSpec", "channels", False),
    ("DebugConfig", "enabled", False),  # the same name in another section
    ("RepeatTerminateConfig", "ngram_size", True),  # dumped as a whole
    ("TrainingConfig", "seed", True),  # handed over by hf_arguments …
    ("TrainingConfig", "effective_batch_size", True),  # … which reads this one to do so
    ("TrainingConfig", "packing_buffer", False),  # and leaves this one out
]


@pytest.mark.parametrize(("section", "key", "read"), CASES)
def test_reads_are_found_and_only_reads(section: str, key: str, read: bool, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    assert ((section, key) in Reads(SECTIONS, [path]).found) is read
