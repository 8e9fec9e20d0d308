"""The commands of README, quickstart and guides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from as_shipped.table import ROOT

PAGES = (
    *(ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/several-machines.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
)
_PROGRAMS = ("coordexp ", "torchrun ", "make ", "python -m src.sft ")
_GROUPS = ("data", "model", "config")  # their commands have two words
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def documented() -> dict[str, set[str]]:
    """Commands without comments and redirections → the pages that have them. Of shell blocks all lines; in running text
    and tables a command with an argument."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command in (*_in_blocks(text), *_in_line(_FENCE.sub("", text))):
            found.setdefault(command, set()).add(page.relative_to(ROOT).as_posix())
    return found


def _in_blocks(text: str) -> Iterator[str]:
    for language, block in _FENCE.findall(text):
        if language != "bash":
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            command = re.split(r"\s+[#>]\s", f"{line} ")[0].strip()
            if command.startswith(_PROGRAMS):
                yield command


def _in_line(text: str) -> Iterator[str]:
    for code in re.findall(r"`([^`\n]+)`", text):
        words = code.split()
        least = 2 if words[:1] == ["make"] else 4 if words[1:2] and words[1] in _GROUPS else 3
        whole = "…" not in code and not (words[:1] == ["torchrun"] and "-m" not in words)
        if code.startswith(_PROGRAMS) and len(words) >= least and whole:
            yield code


@dataclass(frozen=True, slots=True)
class Command:
    """A documented command in a session, started literally in a folder that has the files that it names.

    Attributes:
        text: as documented.
        short: keys that are appended to make a training run short: steps, and validation images.
        makes: files that it leaves.
    """

    text: str
    short: Mapping[str, Any] = field(default_factory=dict)
    makes: tuple[str, ...] = ()


_MODEL = "model.safetensors"
_STEPS = {"training.max_steps": 3, "custom.val_sample_limit": 2, "training.effective_batch_size": 4}

# A user's own data, from annotations to a second stage.
OWN_DATA = (
    Command("coordexp data convert voc path/to/VOC --out data/mine --split train", makes=("data/mine/train.jsonl",)),
    Command("coordexp data convert voc path/to/VOC --out data/mine --split val", makes=("data/mine/val.jsonl",)),
    Command("coordexp data check data/mine/train.jsonl --model checkpoints/start --sheet sheet.png",
            makes=("sheet.png",)),
    Command("coordexp init data/mine --model checkpoints/start", makes=("stage1.yaml",)),
    Command("coordexp config check stage1.yaml"),
    Command("coordexp train stage1.yaml training.max_steps=3 training.output_dir=outputs/trial "
            "training.save_strategy=no", {"custom.val_sample_limit": 2}, ("outputs/trial/model.safetensors",)),
    Command("coordexp train stage1.yaml", _STEPS, ("outputs/stage1/model.safetensors",)),
    Command("coordexp evaluate stage1.yaml --model outputs/stage1", makes=("outputs/stage1/evaluation",)),
    Command("coordexp view outputs/stage1 --out view.html", makes=("view.html",)),
    Command("coordexp predict photos --model outputs/stage1 --save-images", makes=("outputs/predict",)),
    Command("coordexp export coco outputs/predict --out exported", makes=("exported",)),
    Command("coordexp data complete data/mine/train.jsonl --model outputs/stage1 --out data/completed.jsonl --sheet "
            "missed.png", makes=("data/completed.jsonl", "missed.png")),
    Command("coordexp train stage1.yaml custom.train_jsonl=data/completed.jsonl training.output_dir=outputs/completed "
            "model.model=outputs/stage1", _STEPS, ("outputs/completed/model.safetensors",)),
    Command("coordexp evaluate --model outputs/completed --data data/mine/val.jsonl"),
    Command("coordexp init data/mine --model outputs/stage1 --stage 2", makes=("stage2.yaml",)),
    Command("torchrun --nproc_per_node=2 -m coordexp train stage2.yaml", _STEPS,
            ("outputs/stage2/model.safetensors",)),
    Command("coordexp evaluate --model outputs/stage2 --data data/mine/val.jsonl"),
    Command("coordexp evaluate --compare outputs/completed outputs/stage2"),
    Command("coordexp view outputs/stage2 --out view.html", makes=("view.html",)),
    Command("coordexp model export outputs/stage2 checkpoints/mine", makes=("checkpoints/mine/model.safetensors",)),
)  # fmt: skip

# Real photos with the demo's model. The loop over $split is a loop here too.
PHOTOS = (
    Command("coordexp data convert voc BCCD_Dataset --out data/bccd --split $split --factor 16 --min-pixels 4096 "
            "--max-pixels 36000"),
    Command("coordexp data drop data/bccd/$split.jsonl --out data/white/$split.jsonl --per-class RBC=0 "
            "--per-class Platelets=0 --allow-empty", makes=("data/white/train.jsonl",)),
    Command("coordexp init data/white --model checkpoints/demo-stage1 --cpu", makes=("stage1.yaml",)),
    Command("coordexp train stage1.yaml training.num_train_epochs=10 training.eval_steps=65 "
            "data.augment.horizontal_flip=0.5 data.augment.vertical_flip=0.5", {"training.max_steps": 2},
            ("outputs/stage1/model.safetensors",)),
    Command("coordexp evaluate --model outputs/stage1 --data data/white/test.jsonl"),
    Command("coordexp predict BCCD_Dataset/BCCD/JPEGImages --model outputs/stage1 --limit 6 --save-images",
            makes=("outputs/predict",)),
    Command("coordexp data convert labelme photos --out data/photos --name all --geometry bbox --factor 16 "
            "--min-pixels 4096 --max-pixels 36000", makes=("data/photos/all.jsonl",)),
    Command("coordexp data check data/photos/all.jsonl --sheet sheet.png", makes=("sheet.png",)),
    Command("coordexp data split data/photos/all.jsonl --shares train=0.8,val=0.2",
            makes=("data/photos/all.val.jsonl",)),
    Command("coordexp init data/photos --model checkpoints/demo-stage1 --cpu --out photos.yaml --output-dir "
            "outputs/photos", makes=("photos.yaml",)),
    Command("coordexp train photos.yaml training.num_train_epochs=40", {"training.max_steps": 2},
            ("outputs/photos/model.safetensors",)),
)  # fmt: skip

# Conversions and checkpoints, which train nothing.
CONVERSIONS = (
    Command("coordexp data convert voc VOCdevkit/VOC2007 --out data/mine --split train --one-based"),
    Command("coordexp data convert voc VOCdevkit/VOC2007 --out data/mine --split val --one-based"),
    Command("coordexp data check data/mine/train.jsonl"),
    Command("coordexp data check data/mine/train.jsonl --sheet sheet.png", makes=("sheet.png",)),
    Command("coordexp model expand-vocab Qwen/Qwen3-VL-2B-Instruct checkpoints/start",
            makes=("checkpoints/start/model.safetensors",)),
    Command("coordexp launch configs/stage2_rollout_aligned/server_multi_node.yaml --for slurm --learner-nodes 2 "
            "--gpus 8 training.resume_from_checkpoint=true"),
)  # fmt: skip
SESSIONS = {"own data": OWN_DATA, "photos": PHOTOS, "conversions": CONVERSIONS}

# The same start as another command, after what is replaced.
SAME_AS: dict[str, str] = {
    "coordexp init data/tiles --model checkpoints/start": "coordexp init data/mine --model checkpoints/start",
    "coordexp train stage1.yaml training.max_steps=3": "coordexp train stage1.yaml",
    "coordexp train stage2.yaml": "torchrun --nproc_per_node=2 -m coordexp train stage2.yaml",
    "coordexp evaluate stage2.yaml --model outputs/stage2": "coordexp evaluate stage1.yaml --model outputs/stage1",
    "coordexp evaluate --compare outputs/stage1 outputs/stage2":
        "coordexp evaluate --compare outputs/completed outputs/stage2",
    "coordexp evaluate --compare outputs/fixed.jsonl outputs/stage1/evaluation/predictions.jsonl":
        "coordexp evaluate --compare outputs/completed outputs/stage2",
    "coordexp predict photos --model outputs/stage2 --save-images":
        "coordexp predict photos --model outputs/stage1 --save-images",
    "coordexp predict photos --model outputs/stage1": "coordexp predict photos --model outputs/stage1 --save-images",
    "coordexp train stage1.yaml training.max_steps=200 training.output_dir=outputs/rate-a "
    "training.learning_rate=2.0e-5": "coordexp train stage1.yaml",
    "coordexp train stage1.yaml training.max_steps=200 training.output_dir=outputs/rate-b "
    "training.learning_rate=5.0e-5": "coordexp train stage1.yaml",
    "coordexp evaluate stage1.yaml --model outputs/rate-a --limit 200":
        "coordexp evaluate stage1.yaml --model outputs/stage1",
    "coordexp evaluate stage1.yaml --model outputs/rate-b --limit 200":
        "coordexp evaluate stage1.yaml --model outputs/stage1",
    "torchrun --nproc-per-node 8 -m coordexp train stage1.yaml":
        "torchrun --nproc_per_node=2 -m coordexp train stage2.yaml",
    "coordexp launch --for": "coordexp launch configs/stage2_rollout_aligned/server_multi_node.yaml --for slurm "
        "--learner-nodes 2 --gpus 8 training.resume_from_checkpoint=true",
}  # fmt: skip

# Started by other tests, by their files.
ELSEWHERE: dict[str, str] = {
    "make setup": "builds the environment that this suite runs in",
    "make test": "this suite",
    "make check": "before this suite, by .ci/run",
    "make fake-gpu": "tests/fake_cuda/test_fake_gpu.py",
    "make gpu": "on a machine with a GPU",
    "make demo": "tests/integration/test_demo.py",
    "coordexp doctor": "tests/integration/test_doctor.py",
    "python -m src.sft --config stage2.yaml": "tests/scenarios/test_entrypoint_scenarios.py",
    "coordexp data convert coco instances_train.json train_images --out data/mine --name train":
        "tests/unit/data/test_convert_coco.py",
    "coordexp data convert coco instances_val.json val_images --out data/mine --name val":
        "tests/unit/data/test_convert_coco.py",
    "coordexp data convert yolo data.yaml --split train --out data/mine": "tests/unit/data/test_converters.py",
    "coordexp data sample data/white/train.jsonl --count 50 --out data/white/few.jsonl":
        "tests/unit/data/test_subset.py",
    **dict.fromkeys(
        (
            "coordexp data convert voc path/to/VOC --out data/photos --split train --no-resize",
            "coordexp data convert voc path/to/VOC --out data/photos --split val --no-resize",
        ),
        "tests/unit/data/test_converters.py",
    ),
    **dict.fromkeys(
        (
            "coordexp data tile data/photos/train.jsonl --size 512 --overlap 0.2 --negatives 0.1 --out "
            "data/tiles/train.jsonl",
            "coordexp data tile data/photos/val.jsonl --size 512 --overlap 0.2 --out data/tiles/val.jsonl",
        ),
        "tests/unit/data/test_tiles.py",
    ),
    **dict.fromkeys(
        (
            "coordexp predict photos --model outputs/stage1 --tiles 512 --overlap 0.2",
            "coordexp evaluate --model outputs/stage1 --data data/photos/val.jsonl --tiles 512",
            "coordexp data complete data/photos/train.jsonl --model outputs/stage1 --tiles 512 --out "
            "data/completed.jsonl",
        ),
        "tests/unit/inference/test_tiled_answers.py",
    ),
    "coordexp model tiny checkpoints/start": "tests/unit/cli/test_cli_model.py",
    "coordexp model merge outputs/stage1 checkpoints/mine": "tests/unit/cli/test_cli_model.py",
    "torchrun --nproc-per-node 8 -m coordexp train stage1.yaml fsdp.enabled=true training.master_weights=null":
        "tests/integration/test_torchrun.py",
    "coordexp launch configs/stage2_rollout_aligned/server_3v1.yaml": "tests/as_shipped/test_servers.py",
    "coordexp launch configs/stage2_rollout_aligned/server_3v1.yaml --dry-run": "tests/as_shipped/test_servers.py",
    "coordexp launch X.yaml": "tests/as_shipped/test_servers.py",
    "coordexp serve X.yaml --index 0": "tests/as_shipped/test_servers.py",
    "coordexp serve X.yaml --index 1": "tests/as_shipped/test_servers.py",
    # With one machine in place of two: its row is server_multi_node.yaml.
    "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=run1 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 "
    "-m coordexp train X.yaml": "tests/as_shipped/test_servers.py",
}  # fmt: skip
