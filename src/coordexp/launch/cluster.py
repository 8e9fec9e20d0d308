"""A run over several machines, as a job for SLURM, Kubernetes or SkyPilot. Starts nothing and needs no cluster.

Each rollout server has a machine of its own and runs ``coordexp serve --index i``; the trainer runs under torchrun on
the others. Hosts are known only when the job starts, so the configuration reads them from :data:`HOST_VARIABLE`, which
every template sets.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from coordexp.addresses import split_url
from coordexp.config import RunConfig, check_world_size, load_config
from coordexp.engine.wire.engine_process import environment_kept
from coordexp.errors import ConfigError
from coordexp.launch.plan import rollout_devices, server_entries
from coordexp.rollouts.chunking import chunk_size

Scheduler = Literal["slurm", "kubernetes", "skypilot"]
TEMPLATES = {"slurm": "slurm.sh.j2", "kubernetes": "kubernetes.yaml.j2", "skypilot": "skypilot.yaml.j2"}
HOST_VARIABLE = "ROLLOUT_HOST_{index}"
RENDEZVOUS_PORT = 29500
RESTARTS = 5  # of a whole job whose machine died
_NO_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")  # in YAML 1.1
_MOST_HOSTS = 256
_LONGEST_SIGNAL_S = 65535  # of sbatch --signal
_UNKNOWN_HOST = "rollout-host-{index}.invalid"  # placeholder of a host while the configuration is only read


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """The values of the templates: ``servers`` machines with a rollout server each, then ``trainer_nodes`` with
    ``max(1, gpus)`` trainer processes. ``arguments``: ``key.path=value`` after the configuration. ``grace_s``: seconds
    in which a trainer that receives a signal saves and ends; ``wait_s``: seconds in which servers start."""

    name: str
    config: str
    arguments: tuple[str, ...]
    servers: int
    trainer_nodes: int
    gpus: int
    token_variable: str | None
    grace_s: int
    wait_s: int
    time_limit: str

    @property
    def nodes(self) -> int:
        return self.servers + self.trainer_nodes

    @property
    def signal_s(self) -> int:
        """Seconds before SLURM's time limit at which a job is to save: it may signal a minute early."""
        return self.grace_s + 60


def plan_job(config: Path, arguments: Sequence[str], trainer_nodes: int, gpus: int, time_limit: str) -> ClusterJob:
    """The job of a configuration with ``arguments`` (``key.path=value``) on top. ``gpus``: per machine, 0 for CPUs;
    ``time_limit``: SLURM's ``days-hours:minutes:seconds``. Raises ConfigError with every key and option that no cluster
    could run."""
    # Stand-ins for the hosts, by which _problems sees whether the configuration reads their variables.
    hosts = {HOST_VARIABLE.format(index=at): _UNKNOWN_HOST.format(index=at) for at in range(_MOST_HOSTS)}
    with environment_kept(hosts):
        run = load_config(config, arguments=arguments)
    if problems := list(_problems(run, trainer_nodes, gpus, time_limit)):
        raise ConfigError("\n".join(problems))
    server = run.rollout_matching.vllm.server if run.rollout_matching is not None else None
    entries = server_entries(run)
    # Lower case, digits and dashes, at most 40 characters: a name for every scheduler. It begins with a letter,
    # as the DNS names of Kubernetes' services do, and is text in YAML, which 2026-11-28, 007 and true are not.
    name = re.sub(r"[^a-z0-9]+", "-", Path(run.training.output_dir).name.lower()).strip("-")
    if not name[:1].isalpha() or name in _NO_TEXT:
        name = f"coordexp-{name}"
    return ClusterJob(
        name=name[:40].strip("-"),
        config=str(config),
        arguments=tuple(arguments),
        servers=len(entries),
        trainer_nodes=trainer_nodes,
        gpus=gpus,
        token_variable=server.api_key_env if server is not None and entries else None,
        grace_s=round(run.training.stop_within_s) + 15,
        wait_s=round(max(run.launch.wait_s, server.timeout_s if server is not None else 0.0)),
        time_limit=time_limit,
    )


def render(job: ClusterJob, scheduler: Scheduler, image: str = "", accelerator: str = "") -> str:
    """The text of a job. ``image``: Kubernetes' container image, with coordexp in it; ``accelerator``: SkyPilot's name
    for the kind of GPU. Raises ConfigError if one of them is missing where it is needed."""
    if scheduler == "kubernetes" and not image:
        raise ConfigError("--image: missing; name a container image in which coordexp is installed")
    if scheduler == "skypilot" and job.gpus and not accelerator:
        raise ConfigError("--accelerator: missing; name the GPUs as SkyPilot does, for example H200")
    if scheduler == "slurm":
        _check_time_to_train(job)
    environment = Environment(
        loader=PackageLoader("coordexp.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)  # YAML has no pairs of surrogates
    run = shlex.join((job.config, *job.arguments))
    if scheduler == "kubernetes":
        run = run.replace("$", "$$")  # which it reads as $; it would expand $(NAME) itself
    return environment.get_template(TEMPLATES[scheduler]).render(
        job=job,
        run=run,
        host_variables=[HOST_VARIABLE.format(index=index) for index in range(job.servers)],
        rendezvous_port=RENDEZVOUS_PORT,
        restarts=RESTARTS,
        image=image,
        accelerator=accelerator,
    )


def _check_time_to_train(job: ClusterJob) -> None:
    """Raise ConfigError if SLURM would tell a job to save as soon as it has started, after each restart again."""
    days, _, clock = job.time_limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    limit = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if job.signal_s >= min(limit, _LONGEST_SIGNAL_S):
        raise ConfigError(
            f"--time {job.time_limit}: the job would save {job.signal_s} s before its end, and so at once, and be "
            f"queued again; give more time, or lower training.stop_within_s (SLURM takes at most {_LONGEST_SIGNAL_S} s)"
        )


def _problems(run: RunConfig, trainer_nodes: int, gpus: int, time_limit: str) -> Iterator[str]:
    if trainer_nodes < 1:
        yield f"--learner-nodes {trainer_nodes}: give at least one"
    if gpus < 0:
        yield f"--gpus {gpus}: give a number of devices, or 0 for CPUs"
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d{2}:\d{2}", time_limit):
        yield f"--time {time_limit}: give days-hours:minutes:seconds, for example 1-00:00:00"
    if run.training.resume_from_checkpoint is not True:
        yield (
            "training.resume_from_checkpoint: a job that restarts after a machine died would begin from step 0; write "
            "true, or add training.resume_from_checkpoint=true to this command"
        )
    entries, trainers = server_entries(run), trainer_nodes * max(1, gpus)
    if trainers > 0:
        try:
            check_world_size(run, trainers)
        except ConfigError as error:
            yield f"{error} (--learner-nodes {trainer_nodes}, --gpus {gpus})"
    if not entries:
        return
    rollout = run.rollout_matching
    assert rollout is not None and rollout.vllm.server is not None
    for index, entry in enumerate(entries):
        if split_url(entry.base_url).hostname != _UNKNOWN_HOST.format(index=index):
            name = HOST_VARIABLE.format(index=index)
            yield (
                f"rollout_matching.vllm.server.servers[{index}].base_url: {entry.base_url} names its host, which is "
                f"known only when the job starts; write http://${{env:{name}:-{name.lower().replace('_', '-')}}}:PORT"
            )
    if rollout.vllm.server.api_key_env is None:
        yield (
            "rollout_matching.vllm.server.api_key_env: missing, and anyone who reaches a server can overwrite its "
            "weights; name the variable with the token, for example COORDEXP_API_KEY"
        )
    if run.launch.server == "swift":
        yield "launch.server: swift runs under coordexp launch on one machine only; write coordexp"
    parallel = rollout.vllm.tensor_parallel_size
    if gpus > 0 and gpus % parallel:
        yield (
            f"rollout_matching.vllm.tensor_parallel_size: {parallel} devices per engine do not divide the {gpus} of a "
            "machine (--gpus)"
        )
    elif trainers > 0:
        try:
            chunk_size(rollout.decode_batch_size, [rollout_devices(run, gpus)] * len(entries), trainers)
        except ConfigError as error:
            yield str(error)
