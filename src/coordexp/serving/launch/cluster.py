"""A run over several machines, written down for the program that hands machines out: SLURM, Kubernetes, SkyPilot.

Nothing is started here, and nothing of a cluster is needed. Each server has a machine of its own and starts as
``coordexp serve --index i``; the learner runs under torchrun on the others. Hosts are known when the job starts, so the
configuration takes them from :data:`HOST_VARIABLE`; every template sets it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from coordexp.config import RunConfig, load_config
from coordexp.errors import ConfigError
from coordexp.serving.launch.plan import server_entries

Scheduler = Literal["slurm", "kubernetes", "skypilot"]
HOST_VARIABLE = "ROLLOUT_HOST_{index}"
RENDEZVOUS_PORT = 29500
RESTARTS = 5  # of a whole job whose machine died
_MOST_HOSTS = 256
_UNKNOWN_HOST = "rollout-host-{index}.invalid"  # what a host is called where the configuration is only read


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """What every template says in its own words.

    ``servers`` machines with a rollout server each, then ``learner_nodes`` with ``max(1, gpus)`` learner processes.
    ``arguments``: ``key.path=value`` behind the configuration. ``grace_s``: how long a learner that is asked to end may
    take, ``wait_s``: servers to start.
    """

    name: str
    config: str
    arguments: tuple[str, ...]
    servers: int
    learner_nodes: int
    gpus: int
    token_variable: str | None
    grace_s: int
    wait_s: int
    time_limit: str

    @property
    def nodes(self) -> int:
        """Machines in all."""
        return self.servers + self.learner_nodes

    def server_command(self, index: str) -> str:
        """The shell's words for a server; ``index`` may be a variable of the shell."""
        return f"python -m coordexp serve --config {self._named} --index {index}"

    def learner_command(self, head: str, run_id: str) -> str:
        """The shell's words for torchrun on one of the learner's machines; ``head``: where its processes meet."""
        return (
            f"python -m torch.distributed.run --nnodes={self.learner_nodes} --nproc-per-node={max(1, self.gpus)} "
            f'--rdzv-id="{run_id}" --rdzv-backend=c10d --rdzv-endpoint="{head}:{RENDEZVOUS_PORT}" '
            f"--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout={self.grace_s} "
            f"-m coordexp train {self._named}"
        )

    @property
    def _named(self) -> str:
        return shlex.join((self.config, *self.arguments))


def plan_job(config: Path, arguments: Sequence[str], learner_nodes: int, gpus: int, time_limit: str) -> ClusterJob:
    """The job of a configuration.

    Args:
        arguments: ``key.path=value``, on top of the file.
        learner_nodes: machines of the learner.
        gpus: of each machine, servers' and learner's alike; 0 for CPUs.
        time_limit: as SLURM writes it, ``days-hours:minutes:seconds``.

    Raises:
        ConfigError: whatever the configuration says that no cluster could run, all of it, with its keys.
    """
    with _named_hosts():
        run = load_config(config, arguments=arguments)
    problems = list(_problems(run, learner_nodes, gpus, time_limit))
    if problems:
        raise ConfigError("\n".join(problems))
    rollout = run.rollout_matching
    server = rollout.vllm.server if rollout is not None else None
    return ClusterJob(
        name=_dns_name(Path(run.training.output_dir).name),
        config=str(config),
        arguments=tuple(arguments),
        servers=len(server_entries(run)),
        learner_nodes=learner_nodes,
        gpus=gpus,
        token_variable=server.api_key_env if server is not None and server_entries(run) else None,
        grace_s=round(run.training.stop_within_s) + 15,
        wait_s=round(max(run.launch.wait_s, server.timeout_s if server is not None else 0.0)),
        time_limit=time_limit,
    )


@contextmanager
def _named_hosts() -> Iterator[None]:
    """The hosts' variables hold stand-ins, by which :func:`_problems` sees whether the configuration reads them."""
    before = dict(os.environ)
    os.environ.update(
        {HOST_VARIABLE.format(index=index): _UNKNOWN_HOST.format(index=index) for index in range(_MOST_HOSTS)}
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _problems(run: RunConfig, learner_nodes: int, gpus: int, time_limit: str) -> Iterator[str]:
    if learner_nodes < 1:
        yield f"--learner-nodes {learner_nodes}: give at least one"
    if gpus < 0:
        yield f"--gpus {gpus}: give a number of devices, or 0 for CPUs"
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d{2}:\d{2}", time_limit):
        yield f"--time {time_limit}: give days-hours:minutes:seconds, for example 1-00:00:00"
    if run.training.resume_from_checkpoint is not True:
        yield (
            "training.resume_from_checkpoint: a job that starts again after a machine died would begin anew; write "
            "true, or put training.resume_from_checkpoint=true behind this command"
        )
    entries = server_entries(run)
    if not entries:
        return
    rollout = run.rollout_matching
    assert rollout is not None and rollout.vllm.server is not None
    for index, entry in enumerate(entries):
        if urlsplit(entry.base_url).hostname != _UNKNOWN_HOST.format(index=index):
            name = HOST_VARIABLE.format(index=index)
            yield (
                f"rollout_matching.vllm.server.servers[{index}].base_url: {entry.base_url} names its host, which is "
                f"known only when the job starts; write http://${{env:{name}:-{name.lower().replace('_', '-')}}}:PORT"
            )
    if rollout.vllm.server.api_key_env is None:
        yield (
            "rollout_matching.vllm.server.api_key_env: missing, and whoever reaches a server can overwrite its "
            "weights; name the variable that holds the token, for example COORDEXP_API_KEY"
        )
    if run.launch.server == "swift":
        yield "launch.server: swift is started by coordexp launch on one machine alone; write coordexp"
    parallel = rollout.vllm.tensor_parallel_size
    if gpus > 0 and gpus % parallel:
        yield (
            f"rollout_matching.vllm.tensor_parallel_size: {parallel} devices an engine do not divide the {gpus} of a "
            "machine (--gpus)"
        )


def _dns_name(text: str) -> str:
    """Lower case, digits and dashes, at most 40 characters: what every scheduler takes for a name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "coordexp"


def render(job: ClusterJob, scheduler: Scheduler, image: str = "", accelerator: str = "") -> str:
    """The text of a job.

    Args:
        image: Kubernetes: the container's image, with coordexp in it.
        accelerator: SkyPilot: the kind of GPU, as it calls it.

    Raises:
        ConfigError: ``image`` or ``accelerator`` is missing where it is needed.
    """
    if scheduler == "kubernetes":
        if not image:
            raise ConfigError("--image: missing; name a container image in which coordexp is installed")
        return kubernetes_jobset(job, image)
    if scheduler == "skypilot":
        if job.gpus and not accelerator:
            raise ConfigError("--accelerator: missing; name the GPUs as SkyPilot does, for example H200")
        return skypilot_task(job, accelerator)
    return slurm_script(job)


def slurm_script(job: ClusterJob) -> str:
    """A script for ``sbatch``. USR1, sent before the time is up, lets the learner save; the job then queues again."""
    servers, learners = job.servers, job.learner_nodes
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes} --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.gpus}"] if job.gpus else []),
        "#SBATCH --exclusive",
        f"#SBATCH --time={job.time_limit}",
        f"#SBATCH --signal=B:USR1@{job.grace_s + 60}",
        "#SBATCH --requeue --open-mode=append",
        f"#SBATCH --output={job.name}-%j.log",
        "# Partition, account, container and the environment's activation are your site's: add them here.",
        "set -euo pipefail",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'step() { exec srun --overlap --cpu-bind=none --ntasks-per-node=1 --kill-on-bad-exit=1 "$@"; }',
        "",
    ]
    for index in range(servers):
        lines.append(f'export {HOST_VARIABLE.format(index=index)}="${{hosts[{index}]}}"')
    if job.token_variable:
        lines.append(f'export {job.token_variable}="${{{job.token_variable}:-$(openssl rand -hex 32)}}"')
    lines += [
        *(["export OMP_WAIT_POLICY=passive"] if not job.gpus else []),
        f'head="${{hosts[{servers}]}}"',
        'learners="$(IFS=,; echo "${hosts[*]:' + f"{servers}:{learners}" + '}")"',
        "servers=()",
        "trap 'kill \"${servers[@]}\" 2>/dev/null || true' EXIT",
        "",
    ]
    for index in range(servers):
        command = job.server_command(str(index))
        lines += [
            f'step --nodes=1 --ntasks=1 --nodelist="${{hosts[{index}]}}" --output={job.name}-%j-server{index}.log \\',
            f"  {command} &",
            "servers+=($!)",
        ]
    lines += [
        f'step --nodes={learners} --ntasks={learners} --nodelist="$learners" \\',
        f"  {job.learner_command('$head', '$SLURM_JOB_ID')} &",
        "learner=$!",
        "",
        "stopped=0",
        "trap 'stopped=1; kill -USR1 \"$learner\"' USR1  # its processes finish their step and save",
        'while kill -0 "$learner" 2>/dev/null; do',
        '  wait -n "$learner" "${servers[@]}" || true  # a signal ends it too',
        '  if [ "$stopped" = 0 ] && kill -0 "$learner" 2>/dev/null; then',
        "    echo 'a rollout server has ended; the learner saves and ends' >&2",
        '    kill -TERM "$learner"',
        '    wait "$learner" || true',
        "    exit 1",
        "  fi",
        "done",
        "status=0",
        'wait "$learner" || status=$?',
        'if [ "$stopped" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def kubernetes_jobset(job: ClusterJob, image: str) -> str:
    """A JobSet (``jobset.x-k8s.io/v1alpha2``): its pods have names that can be known before they run."""
    hosts = {
        HOST_VARIABLE.format(index=index): f"{job.name}-server-0-{index}.{job.name}" for index in range(job.servers)
    }
    learner = job.learner_command(f"{job.name}-learner-0-0.{job.name}", job.name)
    replicated = [_replicated("learner", job, job.learner_nodes, image, hosts, learner)]
    if job.servers:
        serve = job.server_command('"$JOB_COMPLETION_INDEX"') + ' --host "$POD_IP"'
        replicated.insert(0, _replicated("server", job, job.servers, image, hosts, serve))
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["learner"]},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": replicated,
        },
    }
    secret = (
        f"#   kubectl create secret generic {job.name}-token --from-literal=token=$(openssl rand -hex 32)\n"
        if job.token_variable
        else ""
    )
    return (
        "# Needs JobSet (kubernetes-sigs/jobset), and a claim `data` that all pods may read and write, seen as /data.\n"
        f"# The configuration's paths are paths inside the pods. Before the first time:\n{secret}"
        f"#   kubectl apply -f this-file.yaml; kubectl logs -f job/{job.name}-learner-0\n"
        + yaml.safe_dump(manifest, sort_keys=False, width=200)
    )


def _replicated(
    role: str, job: ClusterJob, pods: int, image: str, hosts: Mapping[str, str], command: str
) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [{"name": name, "value": host} for name, host in hosts.items()]
    if role == "server":  # its name may lead to it only a while after it has started
        variables.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if job.token_variable:
        secret = {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}}
        variables.append({"name": job.token_variable, "valueFrom": secret})
    container: dict[str, Any] = {
        "name": role,
        "image": image,
        "command": ["bash", "-c", f"exec {command}"],  # exec: the pod's SIGTERM reaches torchrun, which lets it save
        "env": variables,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s if role == "learner" else 30,
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": role, "replicas": 1, "template": {"spec": spec}}


def skypilot_task(job: ClusterJob, accelerator: str) -> str:
    """A task for ``sky launch``. Servers end when the learner's meeting place is gone: nothing else tells them."""
    first, last = job.servers, job.nodes - 1
    lines = ["set -euo pipefail", 'mapfile -t hosts <<< "$SKYPILOT_NODE_IPS"']
    lines += [f'export {HOST_VARIABLE.format(index=index)}="${{hosts[{index}]}}"' for index in range(job.servers)]
    lines += [f'head="${{hosts[{first}]}}"', 'index="$SKYPILOT_NODE_RANK"']
    learner = job.learner_command("$head", "$SKYPILOT_TASK_ID")
    if job.servers:
        serve = job.server_command('"$index"')
        lines += [
            f'if [ "$index" -ge {first} ]; then  # the learner: machines {first} to {last}',
            f"  exec {learner}",
            "fi",
            f"{serve} &",
            "server=$!",
            "trap 'kill \"$server\" 2>/dev/null || true' EXIT",
            f'meets() {{ timeout 5 bash -c "</dev/tcp/$head/{RENDEZVOUS_PORT}" 2>/dev/null; }}',
            f"deadline=$((SECONDS + {job.wait_s}))",
            'until meets; do kill -0 "$server"; [ "$SECONDS" -lt "$deadline" ]; sleep 5; done',
            "missed=0",
            'while [ "$missed" -lt 6 ]; do',
            '  kill -0 "$server"',
            "  if meets; then missed=0; else missed=$((missed + 1)); fi",
            "  sleep 10",
            "done",
        ]
    else:
        lines.append(f"exec {learner}")
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "workdir": "."}
    task["resources"] = {
        **({"accelerators": f"{accelerator}:{job.gpus}"} if job.gpus else {}),
        "job_recovery": {"max_restarts_on_errors": RESTARTS},
    }
    task["file_mounts"] = {"/data": {"name": f"{job.name}-data", "mode": "MOUNT"}}
    if job.token_variable:
        task["secrets"] = {job.token_variable: None}
    task["setup"] = "pip install '.[vllm]'"
    task["run"] = "\n".join(lines) + "\n"
    told = (
        f"#   export {job.token_variable}=$(openssl rand -hex 32)\n"
        f"#   sky jobs launch this-file.yaml --secret {job.token_variable}\n"
        if job.token_variable
        else "#   sky jobs launch this-file.yaml\n"
    )
    return f"# The configuration's paths are paths on the machines; outputs belong below /data.\n{told}" + _dump(task)


class _Literal(yaml.SafeDumper):
    """Texts of several lines as blocks, so that a script in a YAML file can be read."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Literal.add_representer(str, _block)


def _dump(data: Mapping[str, Any]) -> str:
    return yaml.dump(dict(data), Dumper=_Literal, sort_keys=False, width=200)
