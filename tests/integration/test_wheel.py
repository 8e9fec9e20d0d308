"""The wheel contains the demo's configurations and checkpoint, and works outside the source tree."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, built from the source tree and unpacked where nothing of the tree is."""
    folder = tmp_path_factory.mktemp("wheel")
    run_python(ROOT, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    run_python(ROOT, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def run_python(cwd: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def run(installed: Path, cwd: Path, code: str) -> str:
    return run_python(cwd, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}")


def test_assets_are_in_the_wheel(installed: Path, tmp_path: Path):
    code = (
        "from coordexp.data.files import asset\n"
        "print(asset('configs/demo/stage2.yaml'), asset('checkpoints/demo-stage1'))"
    )
    for path in run(installed, tmp_path, code).split():
        assert Path(path).is_relative_to(installed / "coordexp" / "_assets")


def test_the_wheels_configurations_name_an_existing_schema(installed: Path):
    named = "# yaml-language-server: $schema="
    found = (installed / "coordexp" / "_assets" / "configs").rglob("*.yaml")
    configs = [path for path in found if path.parent.name != "parts"]
    assert configs
    for config in configs:
        first = config.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(named) and (config.parent / first.removeprefix(named)).is_file()


def test_init_runs_from_the_wheel(installed: Path, tmp_path: Path):
    code = (
        "from pathlib import Path; from coordexp.cli import main; from coordexp.data.files import asset\n"
        "from coordexp.data.scenes import SPARSE, write_scenes\n"
        "data, model = write_scenes(Path('scenes'), 2, SPARSE, 1), asset('checkpoints/demo-stage1')\n"
        "main(['init', str(data), '--model', str(model), '--cpu'])"
    )
    assert "next: coordexp train stage1.yaml" in run(installed, tmp_path, code)


def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path):
    code = (
        "from pathlib import Path; from rich.console import Console; from coordexp.cli.demo import DemoSize, run_demo\n"
        "run_demo(Path('out'), Console(), DemoSize(train_scenes=16, val_scenes=2, max_steps=1, pictures=1))"
    )
    assert "rollout matching" in run(installed, tmp_path, code)
    assert (tmp_path / "out" / "summary.json").is_file()
