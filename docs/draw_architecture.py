"""Writes what docs/architecture.md takes from the code: the picture of the rooms, and the five paths with their files.

python docs/draw_architecture.py            # write docs/architecture.md's tables and docs/images/architecture.svg
python docs/draw_architecture.py --check    # exit 1 if a step names what the code does not define, or a file is stale
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "coordexp"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "images" / "architecture.svg"

# Path → its steps: file below src/coordexp, what is defined there, what it does.
PATHS: dict[str, list[tuple[str, str, str]]] = {
    "key": [
        ("config/source.py", "read_document", "reads the YAML and what it `extends`, and remembers each key's line"),
        ("config/rollout.py", "RolloutMatchingConfig.decode_batch_size", "declares the key: type, bounds, default"),
        ("config/load.py", "validate", "returns the `RunConfig`, or raises with every problem of the file"),
        ("training/run.py", "check_run", "takes its section, with nulls that stand for other keys filled in"),
        ("engine/__init__.py", "build_backend", "passes the section to the backend that it names"),
        ("engine/server_backend.py", "ServerBackend.batch_size", "uses it: this rank's share of all servers"),
    ],
    "image": [
        ("data/dataset_cache.py", "open_records", "reads or maps the record; the image's header is checked"),
        ("data/dataset.py", "RecordDataset.__getitem__", "orders the objects and asks the encoder for the sample"),
        ("modeling/inputs.py", "PromptEncoder.encode", "opens, resizes and splits the image: prompt ids, pixel values"),
        ("rollouts/hf.py", "HFBackend.generate", "shows it to the model that answers (servers get its path or bytes)"),
        ("packing/rows.py", "build_row", "lays the prompt with its image placeholders into a row"),
        ("modeling/inputs.py", "row_inputs", "joins the pixels of a row's images in the order of its segments"),
        ("modeling/forward.py", "supervised_hidden", "runs the vision tower and the language model on the row"),
    ],
    "token": [
        ("rollouts/hf.py", "HFBackend.generate", "the model draws it"),
        ("rollouts/backend.py", "response_tokens", "keeps it if it stands before the end of the turn"),
        ("training/sources.py", "RolloutSource.outcome", "takes the answer from parsing to its target"),
        ("parsing/parse.py", "parse_rollout", "reads what it says, and whether the prefix keeps it"),
        ("matching/assign.py", "match_objects", "decides which annotated object its object is"),
        ("targets/build.py", "build_target", "gives it a role, weights of the loss terms, and a coordinate its target"),
        ("packing/rows.py", "build_row", "gives it a place in a packed row"),
        ("objective/supervision.py", "SupervisionTensors.from_row", "collects weighted positions and labels"),
        ("objective/head.py", "score_head", "computes the scores that some module requested there"),
    ],
    "gradient": [
        ("training/window.py", "WindowBuilder.prepare", "counts each term's positions of the whole step first"),
        ("training/trainer.py", "CoordExpTrainer.compute_loss", "runs one row forward and scales its loss"),
        ("training/objective_step.py", "TrainingObjective.result", "has each module score the row"),
        ("objective/pipeline.py", "ObjectivePipeline", "divides each loss's sum by its term's total over the step"),
        ("objective/head.py", "ChunkedHead.backward", "takes the loss back to hidden states and head, chunk by chunk"),
        ("modeling/attention.py", "row_arguments", "keeps attention, and so the gradient, within each segment"),
        ("training/optimizer.py", "parameter_groups", "gives each part of the model its learning rate"),
    ],
    "tensor": [
        ("modeling/weights.py", "LearnerWeights.full", "gathers and merges it under the plain checkpoint's name"),
        ("engine/push.py", "WeightPusher.push", "decides: all weights or the adapter, compared by checksum or not"),
        ("weight_sync/buckets.py", "in_buckets", "puts it into a bucket: name, shape, type, place"),
        ("engine/push.py", "ServerPusher", "sends the bucket to all servers at the same time"),
        ("engine/client.py", "ServerClient.update_flattened_params", "announces it over HTTP"),
        ("weight_sync/group.py", "Communicator.broadcast", "carries the bytes, by NCCL or Gloo"),
        ("serving/serve/app.py", "build_app", "takes the announcement to every worker"),
        ("engine/worker.py", "WeightSyncExtension.update_flattened_params", "calls the receiver inside vLLM"),
        ("weight_sync/receiver.py", "WeightReceiver.receive", "takes the bytes in, in place where that is proven"),
        ("weight_sync/layout.py", "WeightLayout", "knows which parameter of vLLM's model it is a part of"),
        ("weight_sync/receiver.py", "WeightReceiver.commit", "checks coverage and checksum, and stamps the version"),
    ],
}  # fmt: skip


@cache
def definitions(file: str) -> frozenset[str]:
    """Names of functions, classes, their methods and fields that ``file`` defines."""
    names: set[str] = set()
    for node in ast.parse((SOURCE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    names.add(f"{node.name}.{inner.target.id}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return frozenset(names)


def problems() -> list[str]:
    """Steps that name what the code does not define."""
    return [
        f"{title}: {file} defines no {name}"
        for title, steps in PATHS.items()
        for file, name, _ in steps
        if not (SOURCE / file).is_file() or name not in definitions(file)
    ]


def page(text: str) -> str:
    """``text`` with every table written anew."""
    for title, steps in PATHS.items():
        rows = "".join(f"| `{file}` | `{name}` | {what} |\n" for file, name, what in steps)
        table = f"<!-- path: {title} -->\n\n| file | name | what it does |\n|---|---|---|\n{rows}\n<!-- end of path -->"
        text, count = re.subn(rf"<!-- path: {title} -->.*?<!-- end of path -->", lambda _, t=table: t, text, flags=re.S)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the path {title!r}")
    return text


def rooms() -> dict[str, set[str]]:
    """Each room with those it imports from."""
    imports: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
        if path.parent == SOURCE and path.stem.startswith("__"):
            continue
        own = _room(name)
        targets = imports.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coordexp."):
                targets.add(_room((node.module or "").removeprefix("coordexp.")))
            elif isinstance(node, ast.ImportFrom) and node.module == "coordexp":
                targets |= {_room(alias.name) for alias in node.names if not alias.name.startswith("__")}
        targets.discard(own)
    return imports


def _room(name: str) -> str:
    return name.split(".")[0]


def heights() -> dict[str, int]:
    """How high each room stands: one above the highest room that it imports from."""
    imports = rooms()

    @cache
    def height(room: str) -> int:
        return 1 + max((height(other) for other in imports[room]), default=-1)

    return {room: height(room) for room in imports}


def picture() -> str:
    """The rooms as an SVG: whoever stands higher may import from whoever stands lower, never the other way round."""
    rows: dict[int, list[str]] = {}
    for room, height in sorted(heights().items()):
        rows.setdefault(height, []).append(room)
    width, box, line, gap = 1040, 30, 46, 12
    parts = []
    for height, names in rows.items():
        y = 20 + (max(rows) - height) * line
        sizes = [22 + 8 * len(name) for name in names]
        x = (width - sum(sizes) - gap * (len(sizes) - 1)) / 2
        for name, size in zip(names, sizes, strict=True):
            parts.append(f'<rect x="{x:g}" y="{y}" width="{size}" height="{box}" rx="6"/>')
            parts.append(f'<text x="{x + size / 2:g}" y="{y + 20}">{escape(name)}</text>')
            x += size + gap
    tall = 40 + (max(rows) + 1) * line
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" role="img">\n'
        "<title>Rooms of coordexp, by who imports from whom</title>\n"
        "<style>rect{fill:#eef3fb;stroke:#456}text{font:13px monospace;text-anchor:middle;fill:#123}</style>\n"
        f'<rect x="0" y="0" width="{width}" height="{tall}" style="fill:#fff;stroke:none"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write the page's tables and the picture, or compare them with ``--check``."""
    if wrong := problems():
        sys.exit("\n".join(wrong))
    wanted = {PAGE: page(PAGE.read_text(encoding="utf-8")), PICTURE: picture()}
    if "--check" in sys.argv[1:]:
        stale = [str(path) for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
        if stale:
            sys.exit(f"{', '.join(stale)} out of date; run: python docs/draw_architecture.py")
        return
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
