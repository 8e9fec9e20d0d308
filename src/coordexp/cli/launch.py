"""``coordexp serve``: one rollout server. ``coordexp launch``: servers and trainer of a run, from one command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordexp import distributed
from coordexp.cli.console import echo, open_console, refuse_idle, say
from coordexp.cli.train import Arguments, ConfigFile, Print, print_config
from coordexp.errors import ConfigError
from coordexp.heavy_imports import heavy_imports
from coordexp.hub import hub_model, name_of

_TIME = "1-00:00:00"
_JOBS = ("slurm", "kubernetes", "skypilot")
# The schedulers of --for that use an option; None: a launch from here.
_USED_BY: dict[str, tuple[str | None, ...]] = {
    "--learner-nodes": _JOBS,
    "--gpus": _JOBS,
    "--time": ("slurm",),
    "--image": ("kubernetes",),
    "--accelerator": ("skypilot",),
    "--print": (None,),
    "--host": (None,),
}


def _check_used(job: str | None, given: Mapping[str, object]) -> None:
    """Raises ConfigError for an option that is given and does nothing for ``job``, the scheduler of --for."""
    for option, is_given in given.items():
        jobs = " or ".join(filter(None, _USED_BY[option]))
        belongs = f"belongs to --for {jobs}" if jobs else f"is not for --for {job}"
        refuse_idle(option, is_given and job not in _USED_BY[option], belongs)


def launch(
    config: ConfigFile,
    arguments: Arguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; start nothing.")
    ] = False,
    print_only: Print = False,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Start all servers here, listening on this address instead of that of base_url."),
    ] = None,
    job: Annotated[
        Literal["slurm", "kubernetes", "skypilot"] | None,
        typer.Option("--for", help="Write a job for several machines to standard output instead; start nothing."),
    ] = None,
    learner_nodes: Annotated[int, typer.Option(help="With --for: machines of the trainer.")] = 1,
    gpus: Annotated[int, typer.Option(help="With --for: GPUs of each machine; 0 for CPUs.")] = 8,
    time: Annotated[str, typer.Option(help="With --for slurm: the time limit.")] = _TIME,
    image: Annotated[str, typer.Option(help="With --for kubernetes: the container's image.")] = "",
    accelerator: Annotated[str, typer.Option(help="With --for skypilot: the kind of GPU, e.g. H200.")] = "",
) -> None:
    """Start rollout servers and the trainer of a run.

    Waits until the servers answer, trains under torchrun, and ends everything. Section launch of CONFIG.yaml names the
    devices. The exit code is the trainer's. Ctrl-C ends everything. With --for, write a job for SLURM, Kubernetes or
    SkyPilot instead, in which each server has a machine of its own.
    """
    from coordexp.config import load_config

    distributed.be_alone()
    given = tuple(arguments or ())
    of_jobs = {"--learner-nodes": learner_nodes != 1, "--gpus": gpus != 8, "--time": time != _TIME, "--image": image}
    _check_used(job, {**of_jobs, "--accelerator": accelerator, "--print": print_only, "--host": host})
    if job is not None:
        from coordexp.launch.cluster import plan_job, render

        echo(render(plan_job(config, given, learner_nodes, gpus, time), job, image, accelerator), nl=False)
        return
    if print_only:
        print_config(config, given)
        return
    run = load_config(config, arguments=given)
    from coordexp.checkpoints.run_folder import check_not_running

    check_not_running(Path(run.training.output_dir))  # whose logs would be moved away
    if hub_model(run.model.model) is not None:
        from coordexp.checkpoints.fetch import with_model_here

        run = with_model_here(run)
        given = (*given, f"model.model={name_of(run.model.model)}")  # all processes start from the same commit
    if Path(run.model.model).is_dir():
        from coordexp.runs.start import decide_start

        run = decide_start(run).config
    from rich.text import Text

    from coordexp.engine.wire.engine_process import num_gpus
    from coordexp.launch.plan import look_over
    from coordexp.launch.supervisor import run_plan

    with heavy_imports():
        from coordexp.training.checked_run import check_run

    def trainers_checks(trainers: int) -> object:
        # Without devices its process sees no GPU, unlike this one. Devices that are missing are reported already.
        on_gpus = bool(run.launch.learner_devices) and num_gpus() > 0
        training = run.training if on_gpus else run.training.model_copy(update={"use_cpu": True})
        return check_run(run.model_copy(update={"training": training}), trainers=trainers, servers_are_up=False)

    plan, checks, problems = look_over(run, config.absolute(), given, num_gpus(), trainers_checks, host)
    console = open_console()
    for check in checks:
        mark = ("ok", "green") if check.problem is None else ("no", "red")
        console.print(Text.assemble(mark, f" {check.name}: {check.outcome}"), soft_wrap=True)
    if plan is not None:
        urls = ", ".join(plan.server_base_urls) or "none: the trainer generates by itself"
        say(console, f"server_base_urls: {urls}")
        servers = [server.process for server in plan.servers if server.process is not None]
        for process in (*servers, plan.trainer):
            title = Text.assemble((process.name, "bold"), f" on {process.device_names()}, log {process.log}")
            console.print(title, soft_wrap=True)
            for name, value in process.environment.items():
                say(console, f"  {name}={shlex.quote(value)} \\")  # continued, so that a shell passes it on
            for name, variable in process.secrets.items():
                say(console, f"  {name}=${{{variable}}} \\")
            say(console, f"  {shlex.join(process.command)}")
    if problems:
        raise ConfigError("\n".join(problems))
    if plan is not None and not dry_run:
        raise typer.Exit(run_plan(plan))


def serve(
    config: ConfigFile,
    arguments: Arguments = None,
    index: Annotated[int, typer.Option(min=0, help="Which of rollout_matching.vllm.server.servers to be.")] = 0,
    data_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Number of engines [one per tensor_parallel_size visible GPUs].")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on [listen_host, or the host of base_url].")
    ] = None,
) -> None:
    """Start a rollout server.

    It answers a trainer's rollout requests with the weights that the trainer pushes. Ends on Ctrl-C or SIGTERM.
    """
    import logging

    from coordexp.config import load_config
    from coordexp.config.checks import check_paths

    # Before vLLM is imported: a mistake shows at once, and vLLM would ask the hub itself for a missing folder.
    run = load_config(config, arguments=arguments or ())
    check_paths({"model.model": run.model.model})
    from coordexp.checkpoints.fetch import with_model_here
    from coordexp.checkpoints.folder import check_lengths

    run = with_model_here(run)
    check_lengths(run)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("coordexp").setLevel(logging.INFO)  # not the root: vLLM sets that one
    from coordexp.engine.server.options import serve_options
    from coordexp.engine.server.serving import prepare_environment, run_server
    from coordexp.engine.wire.engine_process import num_gpus

    gpus = num_gpus()
    options = serve_options(run, index, data_parallel_size, gpus, host)
    assert run.rollout_matching is not None  # or serve_options would have refused
    prepare_environment(run.rollout_matching.repeat_terminate, gpu=gpus > 0)
    run_server(options, gpu=gpus > 0)
