"""Every YAML that ships describes a run."""

from pathlib import Path

import pytest

from coordexp.config import load_config, resolved_yaml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


def test_there_are_some():
    assert {path.parent.name for path in SHIPPED} >= {"demo", "stage1", "stage2_rollout_aligned", "bccd"}


@pytest.mark.parametrize("path", SHIPPED, ids=[str(path.relative_to(ROOT)) for path in SHIPPED])
def test_it_loads_and_its_resolved_form_loads_back(path: Path, tmp_path: Path):
    config = load_config(path)
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(config))
    assert load_config(again) == config
