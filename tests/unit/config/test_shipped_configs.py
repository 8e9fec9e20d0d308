"""Every YAML that ships describes a run."""

import re
from pathlib import Path

import pytest

from coordexp.config import load_config, resolved_yaml

ROOT = Path(__file__).parents[3]
# Files in "parts" are for ``extends`` alone.
WHOLE = [path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "parts"]
SHIPPED = sorted(WHOLE)


def test_shipped_configs_exist():
    found = {path.parent.name for path in SHIPPED}
    assert found >= {"demo", "stage1", "stage2_rollout_aligned", "stage2_two_channel", "bccd"}


def test_all_load_and_their_resolved_forms_load_back(tmp_path: Path):
    for number, path in enumerate(SHIPPED):
        config = load_config(path)  # an error names the file
        again = tmp_path / f"resolved{number}.yaml"
        again.write_text(resolved_yaml(config))
        assert load_config(again) == config, path


def test_every_backend_and_split_has_an_example():
    runs = [load_config(path) for path in SHIPPED if path.parent.name == "stage2_rollout_aligned"]
    rollouts = [run.rollout_matching for run in runs if run.rollout_matching is not None]
    engines = {(rollout.rollout_backend, rollout.vllm.mode) for rollout in rollouts}
    assert engines >= {("hf", "colocate"), ("vllm", "colocate"), ("vllm", "server")}
    servers = {len(rollout.vllm.server.servers) for rollout in rollouts if rollout.vllm.server is not None}
    assert servers >= {1, 2, 3}


def test_the_recommended_stage_2_is_the_same_with_every_backend() -> None:
    folder = ROOT / "configs" / "stage2_rollout_aligned"
    rollouts = [load_config(path).rollout_matching for path in sorted(folder.glob("rewritten*.yaml"))]
    recipes = [(one.target, one.maskiou_gate, one.pipeline) for one in rollouts if one is not None]
    assert len(recipes) == 3 and recipes.count(recipes[0]) == 3 and recipes[0][0].answer == "rewritten"
    backends = {(one.rollout_backend, one.vllm.mode) for one in rollouts if one is not None}
    assert backends == {("hf", "colocate"), ("vllm", "colocate"), ("vllm", "server")}


@pytest.mark.parametrize(
    "name",
    [
        "stage1/sft.yaml",
        "stage1/lora.yaml",
        "stage2_rollout_aligned/base.yaml",
        "stage2_rollout_aligned/lora.yaml",
        "stage2_rollout_aligned/parts/rewritten_target.yaml",
        "stage2_two_channel/base.yaml",
    ],
)
def test_full_examples_explain_every_key(name: str):
    explained: set[str] = set()
    for line in (ROOT / "configs" / name).read_text(encoding="utf-8").splitlines():
        key, colon, rest = line.strip().removeprefix("- ").partition(":")
        if colon and rest.strip() and not line.lstrip().startswith("#"):
            assert " # " in line or key in explained or key == "extends", line
            explained.add(key)


def test_fragments_say_so_on_their_first_line() -> None:
    fragments = sorted((ROOT / "configs").rglob("parts/*.yaml"))
    assert fragments
    for path in fragments:
        assert path.read_text(encoding="utf-8").startswith("# Fragment: not a configuration of its own."), path


def test_a_config_with_unmasked_descriptions_gives_the_reason() -> None:
    """Appended descriptions are masked by default; a file that raises the key gives the reason in a comment."""
    for path in (*SHIPPED, *(ROOT / "configs").rglob("parts/*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if found := re.search(r"rollout_fn_desc_weight: ([0-9.]+)", line):
                assert float(found[1]) == 0 or "#" in line or before.lstrip().startswith("#"), f"{path}: {line}"
