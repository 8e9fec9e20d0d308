"""A photograph's cost in a loader process, and the bytes that it sends to the trainer.

One JPEG of smooth noise, its sides multiples of the model's patches as in prepared data, encoded as training does it:
opened, cut into patches and its prompt tokenised. `bytes` is the product's way (`PromptEncoder`): patches of bytes,
each frame once, normalised by the model. `numbers` is the processor's own call: float32 patches, each frame twice, and
the placeholders of the image tokenised as text. Both give the same tokens, and numbers that are equal bit for bit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--side", type=positive, default=768, help="pixels along a side, a multiple of 32 [768]")
    flags.add_argument("--repeats", type=positive, default=21, help="photographs of each median [21]")
    options = flags.parse_args(argv)
    if options.side % 32:
        flags.error(f"--side {options.side} is not a multiple of 32: the processor would change the size")
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    print_machine(console, where, side=options.side, repeats=options.repeats, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.side, options.repeats)
    table = Table("CPU ms of a photograph", "bytes", "numbers")
    for row in ("open", "cut", "all"):
        table.add_row(row, *(f"{result[way][f'{row}_ms']:.1f}" for way in ("bytes", "numbers")))
    table.add_row("MB sent", *(f"{result[way]['mb']:.2f}" for way in ("bytes", "numbers")))
    console.print(table)
    write_json(options.json, "photos", where, {**vars(options), "threads": threads}, result)


def measure(folder: Path, side: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians in CPU milliseconds of both ways, in turn."""
    import numpy as np
    import torch
    from PIL import Image

    from coordexp.data.images import open_rgb
    from coordexp.modeling.inputs import PromptEncoder, build_messages
    from coordexp.modeling.load import load_processor
    from coordexp.modeling.patches import PixelScale, cut
    from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
    from coordexp.records import ImageRecord

    spec = TinySpec(patch=16, min_pixels=256 * 256, max_pixels=4096 * 4096)  # as Qwen3-VL's processor
    processor = load_processor(build_tiny_checkpoint(folder / "model", seed=0, spec=spec))
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)).resize((side, side))
    noisy = np.clip(np.asarray(smooth) + rng.normal(0, 6, (side, side, 3)), 0, 255).astype(np.uint8)
    path = folder / "photo.jpg"
    Image.fromarray(noisy).save(path, quality=90)
    record, image = ImageRecord("photo", path, side, side, ()), open_rgb(path)
    encoder = PromptEncoder(processor, None, None)

    def numbers() -> Any:
        text = processor.apply_chat_template(
            list(build_messages(path, None, None)), tokenize=False, add_generation_prompt=True
        )
        return processor(text=[text], images=[open_rgb(path)], return_tensors="pt")

    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "bytes": {"open": lambda: open_rgb(path), "cut": lambda: cut(processor.image_processor, image),
                  "all": lambda: encoder.encode(record)},
        "numbers": {"open": lambda: open_rgb(path), "cut": lambda: processor.image_processor(images=[image]),
                    "all": numbers},
    }  # fmt: skip
    request, expected = encoder.encode(record), numbers()
    sent = {"bytes": request.model_inputs["pixel_values"], "numbers": expected["pixel_values"]}
    scale = PixelScale.of(processor.image_processor)
    assert list(request.prompt_token_ids) == expected["input_ids"][0].tolist(), "the same tokens"
    assert torch.equal(scale(sent["bytes"], torch.float32), sent["numbers"]), "the same numbers"
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for way, parts in ways.items():
            for part, run in parts.items():
                started = time.process_time()
                run()
                taken.setdefault((way, part), []).append(1e3 * (time.process_time() - started))
    return {
        way: {f"{part}_ms": statistics.median(taken[way, part]) for part in parts} | {"mb": sent[way].nbytes / 1e6}
        for way, parts in ways.items()
    }


if __name__ == "__main__":
    main()
