"""The parts of a step's time on 8, 64 and 512 GPUs, and the load of the network. Calculated: nothing is run.

Counted exactly: bytes of a push, requests, bytes of images. Measured, with `--decoded`: tokens of an answer and forward
passes per token with forced tokens skipped; a pass with drafts counts as one without. Assumed, and yours to set: how
fast a GPU decodes and learns, and the network's bandwidth. With S server and L trainer machines of G GPUs, and B images
a step:

  decode  max(p tokens / one sequence's speed, B tokens / (S G speed of a GPU)), with p forward passes per token: 1, or
          fewer with ``skip_forced_tokens``, which a full GPU gains nothing by, as it computes the skipped tokens too
  push    S P bytes / the first trainer machine's network     each server is sent the weights by itself
  learn   6 N B (image and prompt and answer tokens) / (L G FLOP/s)
  images  B bytes of an image / the trainer machines' network, as base64
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reporting import above_zero, machine, parser, positive, print_machine, write_json
from rich.console import Console
from rich.table import Table

# GPUs → (machines of servers, machines of the trainer, images of a step). On one machine, in GPUs instead.
SPLITS = {8: (6, 2, 64), 64: (5, 3, 512), 512: (48, 16, 4096)}


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--parameters", type=above_zero, default=2.1e9, help="of the model, 2 bytes each [2.1e9]")
    flags.add_argument("--answer", type=positive, default=500, help="tokens of an answer [500]")
    flags.add_argument("--context", type=positive, default=1200, help="tokens of image and prompt [1200]")
    flags.add_argument("--sequence-speed", type=above_zero, default=120.0, help="tokens/s of one answer [120, assumed]")
    flags.add_argument(
        "--passes",
        type=above_zero,
        default=0.24,
        help="forward passes per token with skip_forced_tokens [0.24, decode.py]",
    )
    flags.add_argument(
        "--decoded", type=Path, help="result of decode.py --objects: a step with answers as measured there"
    )
    flags.add_argument("--gpu-speed", type=above_zero, default=8000.0, help="tokens/s of a GPU, full [8000, assumed]")
    flags.add_argument("--flops", type=above_zero, default=4e14, help="FLOP/s of a trainer's GPU [4e14, assumed]")
    flags.add_argument(
        "--network", type=above_zero, default=40e9, help="bytes/s of a machine's network [40e9, assumed]"
    )
    flags.add_argument("--nvlink", type=above_zero, default=300e9, help="bytes/s inside a machine [300e9, assumed]")
    flags.add_argument("--image", type=above_zero, default=2e5, help="bytes of an image [2e5]")
    options = flags.parse_args(argv)
    try:
        measured = decoded_answers(options) if options.decoded else {}
    except OSError as error:
        flags.error(f"--decoded {options.decoded}: {error.strerror}")
    except (ValueError, TypeError, KeyError, AttributeError):
        flags.error(f"--decoded {options.decoded}: not a result of decode.py --objects")
    if options.decoded and not measured:
        flags.error(f"--decoded {options.decoded} has no answers with skipped tokens, as decode.py --objects measures")
    console = Console()
    where = machine()
    print_machine(console, where, on="paper")
    results = {str(gpus): step(gpus, options) for gpus in SPLITS}
    console.print(table({f"{gpus} GPUs": row for gpus, row in results.items()}))
    if measured:
        decoded = {f"8 GPUs, {n} objects": step(8, one) for n, one in measured.items()}
        console.print(table(decoded))
        results |= decoded
    write_json(options.json, "scale", where, {**vars(options), "threads": 1}, results)


def decoded_answers(options: Namespace) -> dict[str, Namespace]:
    """Objects of an answer → options with the tokens and passes that decode.py measured, at its last batch size."""
    rows = json.loads(options.decoded.read_text(encoding="utf-8"))["results"]
    skipped = {row["objects"]: row for row in rows if row.get("form") == "skipped"}
    return {
        n: Namespace(
            **vars(options)
            | {
                "answer": row["tokens"] / row["answers"],
                "passes": row["passes_per_box"] * row["boxes"] / row["tokens"],
            }
        )
        for n, row in skipped.items()
    }


def step(gpus: int, options: Any) -> dict[str, float]:
    """Seconds of a step's parts, and what the trainer's first machine sends."""
    servers, trainers, images = SPLITS[gpus]
    one_machine = gpus == 8
    width = 1 if one_machine else 8
    weights = 2 * options.parameters
    alone = options.answer / options.sequence_speed
    full = images * options.answer / (servers * width * options.gpu_speed)
    decode, skipping = max(alone, full), max(options.passes * alone, full)
    push = servers * weights / (options.nvlink if one_machine else options.network)
    tokens = images * (options.context + options.answer)
    learn = 6 * options.parameters * tokens / (trainers * width * options.flops)
    sent = images * options.image * 4 / 3
    carry = 0.0 if one_machine else sent / (trainers * options.network)
    return {
        "answer_tokens": options.answer, "images": images,
        "server_gpus": servers * width, "trainer_gpus": trainers * width,
        "decode_s": decode, "push_s": push, "learn_s": learn, "images_s": carry,
        "step_s": push + carry + decode + learn, "ahead_s": push + carry + max(decode, learn),
        "skipping_decode_s": skipping, "skipping_step_s": push + carry + skipping + learn,
        "skipping_ahead_s": push + carry + max(skipping, learn),
        "push_gb": servers * weights / 1e9, "images_gb": sent / 1e9,
    }  # fmt: skip


def table(results: dict[str, dict[str, float]]) -> Table:
    """One column for each of ``results``."""
    shown = Table("", *results)
    lines = {
        "tokens of an answer": ("answer_tokens", ".0f"),
        "images of a step": ("images", ".0f"), "GPUs that write": ("server_gpus", ".0f"),
        "GPUs that train": ("trainer_gpus", ".0f"), "decoding, s": ("decode_s", ".2f"), "push, s": ("push_s", ".2f"),
        "images, s": ("images_s", ".3f"), "learning, s": ("learn_s", ".2f"), "a step, s": ("step_s", ".2f"),
        "a step with rollouts_ahead: 1, s": ("ahead_s", ".2f"),
        "decoding with skip_forced_tokens, s": ("skipping_decode_s", ".2f"),
        "a step with it, s": ("skipping_step_s", ".2f"),
        "a step with it and rollouts_ahead: 1, s": ("skipping_ahead_s", ".2f"),
        "sent by the first trainer, GB": ("push_gb", ".0f"),
        "images sent, GB": ("images_gb", ".2f"),
    }  # fmt: skip
    for label, (key, shape) in lines.items():
        shown.add_row(label, *(format(row[key], shape) for row in results.values()))
    return shown


if __name__ == "__main__":
    main()
