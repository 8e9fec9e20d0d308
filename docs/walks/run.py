"""Runs one optimizer step with a rollout server, and returns which files handle five values on their way.

python docs/walks/run.py            # writes walks.json, which docs/draw_architecture.py shows; a minute on two cores
python docs/walks/run.py --check    # exit 1 if a value passes a file that walks.json does not list
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from traced import COLOUR, IMAGE, KEY, KEY_VALUE, LOSS_KEY, STRUCT_CE_WEIGHT

from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPECS, write_scenes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STORED = HERE / "walks.json"
Walks = dict[str, dict[str, list[str]]]
TITLES = ("key", "image", "served image", "token", "loss", "tensor")


def trace(folder: Path) -> Walks:
    """Run the step below ``folder``. Returns: walk, file below src/coordexp, its functions; files in order of first
    sight."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(_config(folder)), encoding="utf-8")
    paths = [str(HERE), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"COORDEXP_WALKS": str(notes), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "coordexp", "launch", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    walks: Walks = {title: {} for title in TITLES}
    texts = sorted((file.read_text(encoding="utf-8") for file in notes.iterdir()), key=lambda text: "key\t" not in text)
    for text in texts:  # the trainer's first
        for walk, name, function in (line.split("\t") for line in text.splitlines()):
            names = walks[walk].setdefault(name, [])
            if (function := function.partition(".<")[0]) not in (*names, "<module>"):  # not its comprehensions
                names.append(function)
    return walks


def _config(folder: Path) -> dict[str, Any]:
    scenes = write_scenes(folder / "scenes", 4, SPECS["framed"], seed=1)
    marked = next(iter(read_jsonl(scenes))).image
    Image.new("RGB", Image.open(marked).size, COLOUR).save(marked.with_name(IMAGE))
    scenes.write_text(scenes.read_text(encoding="utf-8").replace(marked.name, IMAGE), encoding="utf-8")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    pipeline = yaml.safe_load((ROOT / "configs/stage2_rollout_aligned/base.yaml").read_text(encoding="utf-8"))
    objective = pipeline["rollout_matching"]["pipeline"]
    for module in objective["objective"]:
        if module["name"] == "token_ce":
            module["config"][LOSS_KEY] = STRUCT_CE_WEIGHT
    return {
        "extends": str(ROOT / "configs/stage2_rollout_aligned/server.yaml"),
        "model": {"model": str(ROOT / "checkpoints/demo-stage1")},
        "custom": {"train_jsonl": str(scenes), "val_jsonl": None},
        "training": {
            "output_dir": str(folder / "run"), "effective_batch_size": 4, "per_device_train_batch_size": 4,
            "max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "use_cpu": True,
        },
        "data": {"num_workers": 0},
        "global_max_length": 512,
        "rollout_matching": {
            KEY: KEY_VALUE, "max_new_tokens": 192, "pipeline": objective, "monitor_dump": {"enabled": False},
            "vllm": {
                "enforce_eager": True, "gpu_memory_utilization": 0.02,
                "server": {"servers": [{"base_url": f"http://127.0.0.1:{ports[0]}", "group_port": ports[1]}]},
            },
        },
        "launch": {"server_devices": [[]], "learner_devices": []},
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        walks = trace(Path(folder))
    for title, files in walks.items():
        print(f"{title}: {len(files)} files: {', '.join(sorted(files))}")
    if "--check" not in sys.argv[1:]:
        STORED.write_text(json.dumps(walks, indent=1) + "\n", encoding="utf-8")
        return
    stored: Walks = json.loads(STORED.read_text(encoding="utf-8"))
    new = [
        f"{title}: {', '.join(more)}"
        for title, files in walks.items()
        if (more := sorted(set(files) - set(stored[title])))
    ]
    if new:
        sys.exit("\n".join([*new, f"are not in {STORED}; run: python docs/walks/run.py"]))


if __name__ == "__main__":
    main()
