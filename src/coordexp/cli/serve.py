"""``coordexp serve``: one rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.run import Arguments


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command()(serve)


def serve(
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG.yaml", help="The learner's configuration.")],
    arguments: Arguments = None,
    index: Annotated[int, typer.Option(min=0, help="Which of rollout_matching.vllm.server.servers to be.")] = 0,
    data_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Engines side by side [one per tensor_parallel_size visible GPUs].")
    ] = None,
) -> None:
    """Answer rollout requests of learners, with the weights that they push. Ends on Ctrl-C or SIGTERM."""
    import logging

    from coordexp.config import load_config
    from coordexp.config.paths import check_model_path

    # Before vLLM is imported: a mistake shows at once, and transformers would ask the hub for a missing folder.
    run = load_config(config, arguments=arguments or ())
    check_model_path(run, None)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("coordexp").setLevel(logging.INFO)  # not the root: vLLM sets that one
    from coordexp.serving.serve.options import serve_options
    from coordexp.serving.serve.run import prepare_environment, run_server
    from coordexp.vllm_engine.cpu import num_gpus

    gpus = num_gpus()
    options = serve_options(run, index, data_parallel_size, gpus)
    assert run.rollout_matching is not None  # or serve_options would have refused
    prepare_environment(run.rollout_matching.repeat_terminate, gpu=gpus > 0)
    run_server(options, gpu=gpus > 0)
