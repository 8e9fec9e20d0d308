"""Every YAML that ships describes a run."""

from pathlib import Path

from coordexp.config import load_config, resolved_yaml

ROOT = Path(__file__).parents[3]
# Files in "parts" are for ``extends`` alone.
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "parts")


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
