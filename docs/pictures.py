"""Draws every picture of docs/images that is older than what draws it; `make docs` runs this.

Age is decided by content: docs/images/drawn.json has, for each picture, the fingerprint of the code and the data that
it was drawn from (comments and layout of Python do not count) and that of the picture. Pictures of training runs
(OF_RUNS, TERMINALS_OF_RUNS) take minutes and show figures that any change moves, so they are not compared.

python docs/pictures.py                # draw what is out of date and can be drawn here
python docs/pictures.py errors.svg     # draw these again
python docs/pictures.py --check        # exit 1 if one is out of date, and say why
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
IMAGES = DOCS / "images"
RECORD = IMAGES / "drawn.json"
TERMINAL_S = 1800.0
COLUMNS = 118

# Drawn by scripts that compare the file with what they would write (--check).
COMPARED = {
    "architecture.svg": "draw_architecture.py",
    "forced_tokens.svg": "draw_forced_tokens.py",
    "matching.svg": "draw_matching.py",
}
# Drawn by hand, from no code.
BY_HAND = ("channels.svg", "cluster.svg", "push.svg")
# Pictures of training runs: taken by hand with these commands, and not compared with today's code.
OF_RUNS = {
    "demo.png": "coordexp demo; outputs/demo/comparison.png",
    "curves.svg": "python docs/draw_images.py curves RUN docs/images/curves.svg, of 100 steps of rollout matching",
    "viewer.png": "coordexp demo; python docs/draw_images.py page outputs/demo/view.html docs/images/viewer.png",
    "tensorboard-images.png": "tensorboard on a run with monitor_dump, by docs/draw_images.py page",
    "tensorboard-histograms.png": "tensorboard on a run with monitor_dump, by docs/draw_images.py page",
}
# Where the scenes are that commands in pictures name.
SCENES = "data/scenes.jsonl"


@dataclass(frozen=True)
class Picture:
    """``draw(out, folder)``: writes it, with an empty folder for its runs. ``code``: the files, folders and patterns of
    the repository that decide how it looks. ``needs``: programs."""

    file: str
    draw: Callable[[Path, Path], None]
    code: tuple[str, ...]
    needs: tuple[str, ...] = ()


def data_check(out: Path, folder: Path) -> None:
    """``coordexp data check --sheet`` of eight scenes."""
    scenes(folder, 8, "sparse", 5)
    command(folder, "data", "check", SCENES, "--sheet", str(folder / out.name), "--sheet-images", "8")
    shutil.copy(folder / out.name, out)


def detections(out: Path, folder: Path) -> None:
    """Three scenes with what the demo's checkpoint finds."""
    python(ROOT, DOCS / "draw_images.py", "detections", out)


def when_it_helps(out: Path, folder: Path) -> None:
    """The study's results."""
    python(ROOT / "studies" / "when_stage2_helps", "study.py", "picture", out)


def errors(out: Path, folder: Path) -> None:
    """Mistakes in a YAML, findings in a dataset, a server that is not there."""
    scenes(folder, 4, "sparse", 5)
    lines = [json.loads(line) for line in (folder / SCENES).read_text(encoding="utf-8").splitlines()]
    lines[0]["objects"] = [
        {"desc": "cat", "bbox_2d": [600, 200, 150, 300]},
        {"desc": "cat", "bbox_2d": [10, 20, 300, 400]},
    ]
    lines[1]["width"] = 256
    lines[2]["objects"] = [{"desc": "cat", "bbox_2d": [100, 40, 1900, 310]}]
    lines[3]["objects"] = [{"desc": "cat", "bbox_2d": [112, 40, 112, 310]}]
    (folder / SCENES).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    scenes(folder / "good", 4, "sparse", 5)
    base = (
        f"extends: {ROOT}/configs/stage2_rollout_aligned/server.yaml\nmodel: {{model: checkpoints/start}}\n"
        f"custom: {{train_jsonl: good/{SCENES}, val_jsonl: null}}\n"
    )
    typos = "  learning_rat: 1.0e-4\nrollout_matching:\n  max_new_token: 512\n  decode_batch_size: 0\n"
    (folder / "typo.yaml").write_text(f"{base}training:\n  eval_strategy: 'no'\n{typos}", encoding="utf-8")
    alone = "training: {output_dir: outputs/alone, eval_strategy: 'no', use_cpu: true}\n"
    waits = "rollout_matching: {vllm: {server: {timeout_s: 3}}}\n"
    (folder / "alone.yaml").write_text(base + alone + waits, encoding="utf-8")
    link(folder, "demo-stage1", "start")
    terminal(
        out, folder, "what errors look like",
        "coordexp config check typo.yaml", f"coordexp data check {SCENES} | head -24", "coordexp train alone.yaml",
    )  # fmt: skip


def first_training(out: Path, folder: Path) -> None:
    """Stage 1 as the quickstart starts it: 64 steps of ``init``'s configuration, then its evaluation."""
    _train_and_val(folder, 512)
    link(folder, "demo-stage1", "start")
    command(folder, "init", "data/train/scenes.jsonl", "--val", "data/val/scenes.jsonl", "--model", "checkpoints/start")
    train = "coordexp train stage1.yaml training.num_train_epochs=1 training.learning_rate=1e-4"
    terminal(out, folder, "stage 1", train, "coordexp evaluate stage1.yaml --model outputs/stage1 | head -27")


def launch(out: Path, folder: Path) -> None:
    """A rollout server and a trainer on the CPU, by one command."""
    _train_and_val(folder, 80)
    link(folder, "demo-stage1", "start")
    (folder / "served.yaml").write_text(f"""\
extends: {ROOT}/configs/stage2_rollout_aligned/server.yaml
model: {{model: checkpoints/start, dtype: float32}}
custom: {{train_jsonl: data/train/scenes.jsonl, val_jsonl: null}}
training: {{output_dir: outputs/served, max_steps: 20, effective_batch_size: 4, per_device_train_batch_size: 4,
  learning_rate: 1.0e-4, master_weights: null, bf16: false, eval_strategy: 'no', use_cpu: true}}
data: {{num_workers: 0}}
global_max_length: 1024
rollout_matching: {{max_new_tokens: 192, vllm: {{dtype: float32, enforce_eager: true, gpu_memory_utilization: 0.1}}}}
launch: {{server_devices: [[]], learner_devices: []}}
""", encoding="utf-8")  # fmt: skip
    terminal(out, folder, "one server and a trainer on the CPU", "coordexp launch served.yaml")


def _train_and_val(folder: Path, count: int) -> None:
    for split, images, seed in (("train", count, 1), ("val", 64, 2)):
        command(
            folder, "data", "scenes", "--out", f"data/{split}", "--count", images, "--spec", "sparse", "--seed", seed
        )


PAGES, SCENE_CODE = "docs/draw_images.py", "src/coordexp/data/scenes.py"
STUDY = "studies/when_stage2_helps"
PICTURES = (
    Picture("data-check.png", data_check, ("src/coordexp/evaluation/drawing.py", SCENE_CODE)),
    Picture("python.png", detections,
            (PAGES, SCENE_CODE, "src/coordexp/inference/detections.py", "src/coordexp/evaluation/drawing.py",
             "checkpoints/demo-stage1/model.safetensors")),
    Picture("when-it-helps.svg", when_it_helps,
            (f"{STUDY}/picture.py", f"{STUDY}/tables.py", f"{STUDY}/arms.yaml", f"{STUDY}/results")),
    Picture("errors.svg", errors,
            (PAGES, "src/coordexp/data/dataset_check.py", "src/coordexp/config/base.py",
             "src/coordexp/config/from_yaml.py"), ("tmux",)),
)  # fmt: skip


# Drawn when they are named.
TERMINALS_OF_RUNS = (
    Picture("first-training.svg", first_training, (), ("tmux",)),
    Picture("launch.svg", launch, (), ("tmux",)),
)


def fingerprint(code: Sequence[str]) -> str:
    """Hash of files, folders and patterns below the repository; Python counts without comments."""
    digest = hashlib.sha256()
    for name in code:
        found = sorted(path for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
                       if path.is_file() and "__pycache__" not in path.parts)  # fmt: skip
        if not found:
            raise SystemExit(f"{name}: no such file; correct PICTURES in {Path(__file__).name}")
        for path in found:
            content = path.read_bytes()
            if path.suffix == ".py":
                content = _without_comments(content)
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _without_comments(source: bytes) -> bytes:
    """Lines without comments, docstrings and empty ones: the same in every version of Python."""
    lines = source.decode().splitlines()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def of_image(file: str) -> str:
    """Hash of a picture's own bytes."""
    return hashlib.sha256((IMAGES / file).read_bytes()).hexdigest()[:16]


def drawn() -> dict[str, dict[str, str]]:
    """The record: of each picture what it was drawn from, and what it was."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def state_of(picture: Picture) -> dict[str, str]:
    """The record of an up-to-date picture."""
    image = of_image(picture.file) if (IMAGES / picture.file).is_file() else ""
    return {"drawn_from": fingerprint(picture.code), "picture": image}


def out_of_date() -> Iterator[tuple[Picture, str]]:
    """Pictures to draw, and why."""
    record = drawn()
    for picture in PICTURES:
        was, now = record.get(picture.file, {}), state_of(picture)
        if not now["picture"]:
            yield picture, "is missing"
        elif was.get("picture") != now["picture"]:
            yield picture, "is not the picture that was drawn"
        elif was["drawn_from"] != now["drawn_from"]:
            yield picture, f"is older than what draws it ({', '.join(picture.code)})"


def strangers() -> list[str]:
    """Files without an entry here, and entries without a file."""
    known = {*COMPARED, *BY_HAND, *OF_RUNS, *(picture.file for picture in (*PICTURES, *TERMINALS_OF_RUNS))}
    there = {path.name for path in IMAGES.iterdir()} - {RECORD.name}
    return [
        f"docs/images/{name}: nothing draws it; give it an entry in docs/pictures.py" for name in sorted(there - known)
    ] + [f"docs/images/{name}: is missing" for name in sorted({*COMPARED, *BY_HAND, *OF_RUNS} - there)]


def main() -> None:
    """Command line."""
    words = sys.argv[1:]
    if "--check" in words:
        problems = [*strangers(), *(f"docs/images/{one.file} {why}; run: make docs" for one, why in out_of_date())]
        if problems:
            sys.exit("\n".join(problems))
        return
    by_name = {picture.file: picture for picture in (*PICTURES, *TERMINALS_OF_RUNS)}
    if unknown := [word for word in words if word not in by_name]:
        sys.exit(f"{', '.join(unknown)}: not drawn here; expected {', '.join(by_name)}")
    for picture in [by_name[word] for word in words] or [picture for picture, _ in out_of_date()]:
        if missing := [program for program in picture.needs if shutil.which(program) is None]:
            print(f"docs/images/{picture.file}: stays as it is; {', '.join(missing)} is not installed")
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="coordexp-picture-") as folder:
            picture.draw(IMAGES / picture.file, Path(folder))
        if picture in PICTURES:
            record = drawn() | {picture.file: state_of(picture)}
            RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n", encoding="utf-8")
        print(f"docs/images/{picture.file}: drawn in {time.monotonic() - began:.0f} s")


# --- what pictures show ---


@cache
def environment() -> dict[str, str]:
    """In which today's code answers, in the same way everywhere."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "LANG": "C.UTF-8", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip


def python(cwd: Path, *words: object) -> None:
    """Run a script to its end; raises with its output."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def command(folder: Path, *words: object) -> None:
    """``coordexp WORDS`` in ``folder``."""
    python(folder, "-m", "coordexp", *words)


def scenes(folder: Path, count: int, spec: str, seed: int) -> None:
    """``data/scenes.jsonl`` in ``folder``."""
    folder.mkdir(exist_ok=True)
    command(folder, "data", "scenes", "--out", "data", "--count", count, "--spec", spec, "--seed", seed)


def link(folder: Path, checkpoint: str, name: str) -> None:
    """``checkpoints/NAME`` in ``folder``, one of the repository's."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / name).symlink_to(ROOT / "checkpoints" / checkpoint)


def terminal(out: Path, folder: Path, title: str, *commands: str) -> None:
    """A terminal after these commands, each with its prompt: as a person sees it when they have ended."""
    script, socket = folder / "session.sh", f"coordexp-{os.getpid()}"
    shown = "".join(f"printf '\\033[1m$ %s\\033[0m\\n' {json.dumps(one)}\n{one}\n" for one in commands)
    script.write_text(f"clear\n{shown}tmux -L {socket} wait-for -S done\nsleep 60\n", encoding="utf-8")
    tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
    start = [*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", "120", "-c", str(folder), f"bash {script}"]
    subprocess.run(start, env=environment() | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, check=True)
    try:
        subprocess.run([*tmux, "wait-for", "done"], check=True, timeout=TERMINAL_S)
        text = subprocess.run([*tmux, "capture-pane", "-ep"], check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    text = text.replace(str(ROOT), "/srv/coordexp").replace(str(folder), "/srv/work")
    words = [sys.executable, str(DOCS / "draw_images.py"), "terminal", title, str(out)]
    subprocess.run(words, input=text, env=environment(), check=True, text=True, capture_output=True)


if __name__ == "__main__":
    main()
