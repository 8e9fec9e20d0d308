"""Writes what docs/architecture.md takes from the code: the picture of the data's way, and five paths with their files.

python docs/draw_architecture.py            # write docs/architecture.md's tables and docs/images/architecture.svg
python docs/draw_architecture.py --check    # exit 1 if a step names what the code does not define, or a file is stale
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "coordexp"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "images" / "architecture.svg"

# Path → its steps: (file below src/coordexp, name defined in it, its role), for a run with vLLM servers.
# A file counts once; the page says how many files each path passes.
PATHS: dict[str, list[tuple[str, str, str]]] = {
    "key": [
        ("config/source.py", "read_document", "reads the YAML and what it `extends`, and remembers each key's line"),
        ("config/rollout.py", "RolloutMatchingConfig.decode_batch_size", "declares the key: type, bounds, default"),
        ("config/load.py", "validate", "returns the `RunConfig`, or raises with every problem of the file"),
        ("training/run.py", "check_run", "reads its section, with null values replaced by those of other keys"),
        ("engine/trainer/backends.py", "build_backend", "passes the section to the backend that it names"),
        ("engine/trainer/server_backend.py", "ServerBackend.batch_size", "uses it: this rank's share of all servers"),
    ],
    "image": [
        ("data/dataset_cache.py", "open_records", "reads or maps the record"),
        ("data/dataset.py", "RecordDataset.__getitem__", "orders the objects and encodes the sample"),
        ("data/images.py", "open_rgb", "opens the file, turned and in RGB"),
        ("modeling/inputs.py", "PromptEncoder.encode", "makes the prompt's tokens around it"),
        ("modeling/patches.py", "cut", "resizes it and cuts it into patches of bytes, which the model normalises"),
        ("training/batches.py", "StepBatches.take", "gives the sample to its optimizer step"),
        ("training/step.py", "prepare_step", "puts the pixels next to the sample's target"),
        ("packing.py", "build_row", "lays the prompt with its image placeholders into a row"),
        ("training/rows.py", "RowBuilder", "joins the pixels of a row's images, on the device"),
        ("modeling/forward.py", "supervised_hidden", "runs the vision tower and the language model on the row"),
    ],
    "served image": [
        ("training/answers.py", "RolloutQueue", "puts the request into a round"),
        ("engine/trainer/server_backend.py", "ServerBackend.generate_window", "assigns it to a server"),
        ("engine/wire/protocol.py", "image_source", "writes the file's path, or its bytes, into the request"),
        ("engine/trainer/client.py", "ServerClient.infer", "sends the request"),
        ("engine/server/app.py", "RolloutServer.infer", "receives it"),
        ("engine/wire/protocol.py", "open_image", "opens the image"),
        ("engine/server/served_engine.py", "ServedEngine.render", "processes prompt and image for vLLM"),
    ],
    "token": [
        ("engine/trainer/client.py", "ServerClient.infer", "receives it from the server"),
        ("engine/trainer/server_backend.py", "ServerBackend.generate_window", "assigns the answer to its request"),
        ("engine/wire/protocol.py", "read_answer", "checks the answer's shape and weight version"),
        ("rollouts/backend.py", "response_tokens", "keeps it if it comes before the end of the turn"),
        ("training/answers.py", "AnswerReader", "has it parsed and matched, then corrected by the step's policy"),
        ("parsing/parse.py", "parse_rollout", "reads the objects; decides which tokens the prefix keeps"),
        ("targets/build.py", "build_target", "gives it a role, weights of the loss terms, and a coordinate its target"),
        ("packing.py", "build_row", "gives it a place in a packed row"),
        ("training/rows.py", "RowBuilder", "makes the row's tensors: inputs, supervision"),
        ("objective/pipeline.py", "RowObjective.scores", "runs the forward on the row's tensors"),
        ("objective/head.py", "score_head", "computes the scores that some module requested there"),
        ("training/step.py", "TrainStep.accumulate", "runs all of this, from answers to the gradient"),
    ],
    "loss": [
        ("config/objective.py", "PipelineConfig", "declares the module and its keys"),
        ("training/tasks.py", "build_tasks", "builds the pipeline and the token weights of its channel"),
        ("targets/weights.py", "weigh_tokens", "writes the weight of each token in the term"),
        ("objective/head.py", "score_head", "computes what its module requires of the language head"),
        ("objective/pipeline.py", "TokenCE", "sums weighted values over a row, divides by the step's count"),
        ("training/step.py", "prepare_step", "counts the term's positions on all ranks; runs the backward pass"),
    ],
    "logged loss": [
        ("training/rows.py", "DeviceMetrics", "keeps it on the device until the step ends"),
        ("metrics/reduce.py", "reduce_metrics", "adds it up over ranks and steps of a log line"),
        ("metrics/table.py", "all_metrics", "names it in logs: unit, reduction, meaning"),
    ],
    "tensor": [
        ("modeling/weights.py", "LearnerWeights.full", "gathers and merges it under the plain checkpoint's name"),
        ("engine/trainer/push.py", "WeightPusher.push", "decides: all weights or the adapter, with checksums or not"),
        ("weight_sync/buckets.py", "in_buckets", "puts it into a bucket: name, shape, type, place"),
        ("engine/trainer/client.py", "ServerClient.update_flattened_params", "announces it over HTTP"),
        ("weight_sync/group.py", "Communicator.broadcast", "carries the bytes, by NCCL or Gloo"),
        ("engine/server/app.py", "RolloutServer.update_flattened_params", "passes the announcement to every worker"),
        ("engine/server/served_engine.py", "ServedEngine.workers", "calls the workers of all ranks"),
        ("engine/worker/extension.py", "WeightSyncExtension.update_flattened_params", "calls the receiver inside vLLM"),
        ("weight_sync/receiver.py", "WeightReceiver.receive", "receives the bytes, checks coverage and checksum"),
        ("weight_sync/receiver.py", "WeightLayout", "maps it to its part of a parameter of vLLM's model"),
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
    """Return ``text`` with every table regenerated."""
    for title, steps in PATHS.items():
        rows = "".join(f"| `{file}` | `{name}` | {what} |\n" for file, name, what in steps)
        files = len({file for file, _, _ in steps})
        header = f"{files} files:\n\n| file | name | what it does |\n|---|---|---|\n"
        table = f"<!-- path: {title} -->\n\n{header}{rows}\n<!-- end of path -->"
        text, count = re.subn(rf"<!-- path: {title} -->.*?<!-- end of path -->", lambda _, t=table: t, text, flags=re.S)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the path {title!r}")
    return text


# The data's way through the packages: (package, column, row, output).
FLOW = (
    ("data", 0, 0, "JSONL + images → samples"),
    ("modeling", 1, 0, "prompt tokens, pixels"),
    ("rollouts, engine", 2, 0, "the model's own answers"),
    ("parsing", 3, 0, "objects, usable prefix"),
    ("matching", 4, 0, "found, missed, wrong"),
    ("targets", 4, 1, "Y_train, weight per loss term"),
    ("packing", 3, 1, "packed rows"),
    ("modeling", 2, 1, "one forward per row"),
    ("objective", 1, 1, "losses / totals → gradient"),
    ("training", 0, 1, "optimizer: new weights"),
)
WIDTH, HEIGHT, GAP, TOP = 188, 58, 24, 34


def picture() -> str:
    """The way of the data as an SVG, from JSONL to the weights that write the next answers."""
    parts, places = [], []
    for name, column, row, makes in FLOW:
        x, y = 16 + column * (WIDTH + GAP), TOP + row * 130
        places.append((x, y))
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        parts.append(f'<text class="name" x="{x + WIDTH / 2:g}" y="{y + 24}">{escape(name)}</text>')
        parts.append(f'<text x="{x + WIDTH / 2:g}" y="{y + 44}">{escape(makes)}</text>')
    for (x1, y1), (x2, y2) in pairwise(places):
        if y1 == y2:
            start, end = (x1 + WIDTH, x2) if x2 > x1 else (x1, x2 + WIDTH)
            parts.append(f'<path d="M{start} {y1 + HEIGHT // 2} H{end}"/>')
        else:
            parts.append(f'<path d="M{x1 + WIDTH // 2} {y1 + HEIGHT} V{y2}"/>')
    (x, y), (to_x, to_y) = places[-1], places[2]  # new weights go to the engine that generates answers
    parts.append(f'<path d="M{x + WIDTH // 2} {y} V{y - 36} H{to_x + WIDTH // 2} V{to_y + HEIGHT}"/>')
    parts.append(f'<text x="{x + WIDTH + GAP + 90}" y="{y - 42}">weight_sync: pushed before the next answers</text>')
    width, tall = 32 + 5 * WIDTH + 4 * GAP, TOP + 130 + HEIGHT + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" role="img">\n'
        "<title>The way of the data through the packages of coordexp</title>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" style="fill:#456;stroke:none"/></marker></defs>\n'
        "<style>rect{fill:#eef3fb;stroke:#456}text{font:12px sans-serif;text-anchor:middle;fill:#123}"
        ".name{font:bold 14px monospace}path{fill:none;stroke:#456;marker-end:url(#tip)}</style>\n"
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
