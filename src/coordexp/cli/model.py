"""``coordexp model``: make, merge and inspect checkpoints with the coordinate tokens."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordexp.cli.console import check_checkpoint, echo, new_folder
from coordexp.cli.usage import App
from coordexp.heavy_imports import heavy_imports

Dtype = Literal["float32", "bfloat16", "float16"]
model_app = App("Make, merge and inspect checkpoints.")


@model_app.add("tiny", "coordexp model tiny checkpoints/tiny")
def tiny_command(
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny checkpoint with random weights, for a CPU."""
    with new_folder(out):
        with heavy_imports():
            from coordexp.modeling.tiny import build_tiny_checkpoint

        build_tiny_checkpoint(out, seed)
    echo(f"wrote {out}")


@model_app.add("expand-vocab", "coordexp model expand-vocab Qwen/Qwen3-VL-2B-Instruct checkpoints/start")
def expand_vocab_command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A Qwen3-VL checkpoint, which is left as it is: a folder, or a model of the Hugging Face hub."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
) -> None:
    """Add the 1000 coordinate tokens to a Qwen3-VL checkpoint."""
    with new_folder(out):
        checkpoint = check_checkpoint(checkpoint)
        with heavy_imports():
            from coordexp.modeling.expand_vocab import expand_vocab

        expand_vocab(checkpoint, out)
    echo(f"wrote {out}")


@model_app.add("export", "coordexp model export outputs/stage2 checkpoints/mine")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, such as a run's output_dir.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Number type of the weights; the run's own without it.")] = None,
    target: Annotated[
        Literal["openai"] | None,
        typer.Option("--for", help="openai: for vllm serve and others, which hide special tokens and resize images."),
    ] = None,
) -> None:
    """Write a run's weights, tokenizer and processor alone."""
    with new_folder(out):
        checkpoint = check_checkpoint(checkpoint)
        with heavy_imports():
            from coordexp.modeling.load import export_checkpoint

        export_checkpoint(checkpoint, out, dtype, for_openai=target is not None)
    echo(f"wrote {out}")
    if target is not None:
        from coordexp.checkpoints.card import read_card
        from coordexp.config.schema import DEFAULT_PROMPT

        training = read_card(checkpoint).training
        echo(f"the text of a request, after its image: {DEFAULT_PROMPT if training is None else training.prompt}")
        if training is not None and training.system is not None:
            echo(f"its system message: {training.system}")


@model_app.add("merge", "coordexp model merge outputs/stage1_lora checkpoints/stage1")
def merge_command(
    run: Annotated[Path, typer.Argument(help="A LoRA run's output_dir, or one of its checkpoint-N folders.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    base: Annotated[
        Path | None, typer.Option(help="The model that the adapters were trained on, if it moved since.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number type of the weights; the run's own without it.")] = None,
) -> None:
    """Merge a LoRA run into a plain checkpoint.

    The result has the run's adapters and coordinate rows in its weights; transformers and vLLM load it.
    """
    with new_folder(out):
        run = check_checkpoint(run, has_base=base is None)
        base = None if base is None else check_checkpoint(base)
        with heavy_imports():
            from coordexp.modeling.load import merge_checkpoint

        merge_checkpoint(run, out, base, dtype)
    echo(f"wrote {out}")


@model_app.add("info", "coordexp model info outputs/stage1")
def info_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or a LoRA run's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show sizes, parts, tokens and adapters of a checkpoint."""
    checkpoint = check_checkpoint(checkpoint)
    from coordexp.checkpoints.describe import describe

    info = describe(checkpoint)
    if as_json:
        echo(json.dumps(asdict(info), indent=2))
        return
    adapter = info.adapter
    lines = [
        ("checkpoint", info.path),
        *(() if info.source is None else (("source", info.source),)),
        ("model", f"{info.model_type}, {info.layers} layers, hidden {info.hidden}, {info.dtype}"),
        ("parameters", ", ".join(f"{part} {count:,}" for part, count in info.parameters.items())),
        ("vocabulary", f"{info.vocab_rows:,} rows, {'tied' if info.tied_head else 'untied'} head"),
        ("coord tokens", info.coord_tokens),
        *((f"linear, {part}", " ".join(names)) for part, names in info.linear_modules.items()),
    ]
    if adapter is not None:
        rows = ", coordinate rows" if adapter.coordinate_rows else ""
        kind = "DoRA" if adapter.dora else "LoRA"
        what = "" if adapter.rank is None else f", {kind} of rank {adapter.rank}, alpha {adapter.alpha:g}"
        lines += [("adapter", f"{adapter.parameters:,} parameters{what}{rows}"), ("base", adapter.base)]
    for name, value in lines:
        echo(f"{name:<16} {value}")
