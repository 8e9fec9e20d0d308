"""``coordexp train``, ``evaluate``, ``demo``: what runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import no_bars_in_log_files, open_console

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")]


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(train)
    app.command()(evaluate)
    app.command()(demo)


def train(config: ConfigFile) -> None:
    """Train as CONFIG.yaml says: stage 1, or stage 2 where custom.trainer_variant names one.

    To go on after an interruption, set training.resume_from_checkpoint: true in the YAML and run the same command.
    """
    from coordexp.config import load_config

    run = load_config(config)  # before the import of torch: a mistake in the YAML shows at once
    from coordexp.training.build import run_training

    console = open_console()
    no_bars_in_log_files()
    run_training(run, console, run.custom.trainer_variant or "stage 1", config)
    console.print(f"saved to {run.training.output_dir}", highlight=False, markup=False, soft_wrap=True)


def evaluate(
    config: ConfigFile,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to evaluate instead of model.model.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL to evaluate on instead of custom.val_jsonl.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of metrics.json and predictions.jsonl [<output_dir>/evaluation].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json on stdout instead of a table.")] = False,
) -> None:
    """Let a checkpoint answer for every image of a dataset, and compare with the ground truth."""
    from coordexp.config import load_config

    run = load_config(config)
    from coordexp.evaluation.report import figures_table
    from coordexp.training.evaluate import run_evaluation

    console = open_console(stderr=as_json)
    no_bars_in_log_files()
    result = run_evaluation(run, console, model=model, data=data, limit=limit, output=output)
    if as_json:
        if not console.quiet:
            typer.echo(result.metrics_json.read_text(encoding="utf-8"), nl=False)
        return
    console.print(figures_table({str(model or run.model.model): result.metrics}, title=str(result.data)))
    found = {name: int(result.metrics[name]) for name in ("images", "gt_objects", "pred_objects", "matched_objects")}
    console.print(
        f"{found['images']} images with {found['gt_objects']} objects; {found['pred_objects']} predicted, "
        f"{found['matched_objects']} of them right",
        highlight=False,
    )
    console.print(
        f"wrote {result.metrics_json} and {result.predictions_jsonl}", highlight=False, markup=False, soft_wrap=True
    )


def demo(
    output: Annotated[Path, typer.Option(help="Folder of the figures, pictures and checkpoints.")] = Path(
        "outputs/demo"
    ),
) -> None:
    """Teach a small detector by rollout matching on this machine's CPU, and show what it learned."""
    from coordexp.demo import run_demo

    run_demo(output, open_console())
