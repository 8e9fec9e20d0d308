"""Jobs for several machines: the files for SLURM, Kubernetes and SkyPilot, and the behaviour of the scripts.

SLURM's and SkyPilot's scripts run for real in bash. The cluster's programs are fakes: ``srun`` runs its program
here, ``scontrol`` prints hosts, and ``python`` is either a server that runs until it is stopped or a trainer with a
given exit code.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordexp.errors import ConfigError
from coordexp.launch import cluster
from coordexp.launch.cluster import ClusterJob, plan_job, render
from support.cli_runs import Cli
from support.config_samples import set_keys, write_yaml

CONFIG = Path(__file__).parents[3] / "configs" / "stage2_rollout_aligned" / "server_multi_node.yaml"
RESUME_KEY = "training.resume_from_checkpoint"
RESUME = f"{RESUME_KEY}=true"
JOB = ClusterJob("run", "X.yaml", ("a.b=1 2",), 2, 2, 8, "COORDEXP_API_KEY", 60, 900, "1-00:00:00")

FAKE_PYTHON = """\
#!/bin/bash
# Stands for coordexp serve and torchrun.
echo "$2 $(printf '%s|' "$@") hosts=$ROLLOUT_HOST_0,$ROLLOUT_HOST_1 token=${#COORDEXP_API_KEY}" >> "$FAKES/calls"
if [ "$3" = serve ]; then
  [ "${!#}" = "$FAKE_DEAD_SERVER" ] && { sleep 0.3; exit 7; }
  trap 'echo "server ${!#} ended" >> "$FAKES/calls"; exit 0' TERM
else
  trap 'echo "trainer saves for USR1" >> "$FAKES/calls"; exit 0' USR1
  trap 'echo "trainer saves for TERM" >> "$FAKES/calls"; exit 0' TERM
  [ -n "$FAKE_TRAINER_ENDS" ] && { sleep "${FAKE_TRAINER_AFTER:-0.3}"; exit "$FAKE_TRAINER_ENDS"; }
fi
echo up >> "$FAKES/up"
for _ in $(seq 600); do sleep 0.1 & wait $!; done
exit 99
"""
FAKE_SRUN = """\
#!/bin/bash
# Stands for srun: the step runs on this machine.
words=("$@")
while [[ "${words[0]}" == --* ]]; do
  [[ "${words[0]}" == --nodelist=* ]] && echo "step on ${words[0]#--nodelist=}" >> "$FAKES/calls"
  words=("${words[@]:1}")
done
exec "${words[@]}"
"""
FAKE_SCONTROL = """\
#!/bin/bash
if [ "$1" = show ]; then printf 'node%s\\n' 1 2 3 4; else echo "requeued $2" >> "$FAKES/calls"; fi
"""


class Fakes:
    """A folder of fake cluster programs, and their notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {"python": FAKE_PYTHON, "srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        defaults = {"FAKE_DEAD_SERVER": "none", "FAKE_TRAINER_ENDS": "", "COORDEXP_API_KEY": "secret"}
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-c", script], text=True, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, **defaults, "PATH": path, "FAKES": str(self.folder), **environment},
        )  # fmt: skip

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (self.folder / "up").is_file() and len((self.folder / "up").read_text().split()) == count:
                return
            time.sleep(0.05)
        raise AssertionError(f"{count} programs were to come up; noted: {self.calls()}")


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr; nothing of the script's session is left behind."""
    try:
        told = process.communicate(timeout=60)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, told


SLURM = {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize("code", [0, 3])
def test_a_slurm_job_has_the_trainers_exit_code_and_ends_its_servers(fakes: Fakes, code: int) -> None:
    found, told = end(fakes.start(render(JOB, "slurm"), FAKE_TRAINER_ENDS=str(code), **SLURM))
    assert found == code, told
    calls = fakes.calls()
    assert {call for call in calls if call.startswith("step")} == {
        f"step on {nodes}" for nodes in ("node1", "node2", "node3,node4")
    }
    assert sum("|serve|--config|X.yaml|a.b=1 2|--index|" in call for call in calls) == 2
    (trainer,) = [call for call in calls if "torch.distributed.run" in call]
    assert "|--nnodes=2|--nproc-per-node=8|--rdzv-id=17|--rdzv-backend=c10d|--rdzv-endpoint=node3:29500|" in trainer
    assert trainer.endswith("hosts=node1,node2 token=6")
    assert not any(call.startswith("requeued") for call in calls)


def test_a_slurm_job_has_all_memory_of_its_machines() -> None:
    assert {"--exclusive", "--mem=0"} <= set(render(JOB, "slurm").split())


def test_a_slurm_job_generates_a_missing_token(fakes: Fakes) -> None:
    end(fakes.start(render(JOB, "slurm"), FAKE_TRAINER_ENDS="0", COORDEXP_API_KEY="", **SLURM))
    assert {call.rpartition("token=")[2] for call in fakes.calls() if "token=" in call} == {"64"}


def test_a_slurm_job_saves_and_requeues_before_its_time_limit(fakes: Fakes) -> None:
    process = fakes.start(render(JOB, "slurm"), **SLURM)
    fakes.wait_for(3)
    process.send_signal(signal.SIGUSR1)  # what --signal=B:USR1@… makes SLURM do
    found, told = end(process)
    assert found == 0, told
    assert "trainer saves for USR1" in fakes.calls() and fakes.calls().count("requeued 17") == 1
    assert "--signal=B:USR1@120" in render(JOB, "slurm")  # the trainer's 60 seconds, and a minute


def test_a_slurm_job_that_loses_a_server_lets_the_trainer_save_and_fails(fakes: Fakes) -> None:
    """Without a signal: after SLURM's own SIGTERM, of which servers end first, a second one means at once."""
    job = render(JOB, "slurm")
    found, told = end(fakes.start(job, FAKE_DEAD_SERVER="1", FAKE_TRAINER_ENDS="0", FAKE_TRAINER_AFTER="2", **SLURM))
    assert found == 1 and "a rollout server has ended" in told
    assert not any("saves" in call for call in fakes.calls())


def test_a_slurm_job_ends_a_trainer_that_does_not_notice_a_lost_server(fakes: Fakes) -> None:
    found, _ = end(fakes.start(render(replace(JOB, grace_s=1), "slurm"), FAKE_DEAD_SERVER="1", **SLURM))
    assert found == 1 and "trainer saves for TERM" in fakes.calls()


def test_without_servers_a_slurm_job_runs_only_the_trainer(fakes: Fakes) -> None:
    job = replace(JOB, servers=0, token_variable=None, gpus=0)
    found, told = end(fakes.start(render(job, "slurm"), FAKE_TRAINER_ENDS="0", **SLURM))
    assert found == 0, told
    (step, trainer) = fakes.calls()
    assert step == "step on node1,node2" and "|--nproc-per-node=1|" in trainer and "endpoint=node1:29500" in trainer
    assert "gpus" not in render(job, "slurm") and "API_KEY" not in render(job, "slurm")


@pytest.fixture
def meeting_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(cluster, "RENDEZVOUS_PORT", listening.getsockname()[1])
        yield listening


def test_a_skypilot_server_runs_as_long_as_the_rendezvous(fakes: Fakes, meeting_place: socket.socket) -> None:
    script = yaml.safe_load(render(JOB, "skypilot", accelerator="H200"))["run"].replace("sleep 10", "sleep 0.1")
    addresses = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n127.0.0.1\n10.0.0.4", "SKYPILOT_TASK_ID": "t"}
    process = fakes.start(script, SKYPILOT_NODE_RANK="1", **addresses)
    fakes.wait_for(1)
    time.sleep(0.5)
    assert process.poll() is None
    meeting_place.close()
    assert end(process)[0] == 0
    for part in ("|serve|--config|X.yaml|a.b=1 2|--index|1|", "hosts=10.0.0.1,10.0.0.2"):
        assert part in fakes.calls()[0]


@pytest.mark.parametrize(("rank", "code"), [("2", 0), ("3", 4)])
def test_skypilot_runs_the_trainer_after_the_server_machines(fakes: Fakes, rank: str, code: int) -> None:
    script = yaml.safe_load(render(JOB, "skypilot", accelerator="H200"))["run"]
    addresses = {"SKYPILOT_NODE_IPS": "a\nb\nc\nd", "SKYPILOT_TASK_ID": "t", "FAKE_TRAINER_ENDS": str(code)}
    assert end(fakes.start(script, SKYPILOT_NODE_RANK=rank, **addresses))[0] == code
    (call,) = fakes.calls()
    assert "--rdzv-endpoint=c:29500|" in call and "--rdzv-id=t|" in call


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [one["template"]["spec"]["template"]["spec"] for one in manifest["spec"]["replicatedJobs"]]


def test_kubernetes_pods_use_the_jobsets_names() -> None:
    manifest = yaml.safe_load(render(JOB, "kubernetes", image="registry/coordexp:1"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec, (server, trainer) = manifest["spec"], pods(manifest)
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "run"}
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["trainer"]  # servers never end by themselves
    assert [one["name"] for one in spec["replicatedJobs"]] == ["server", "trainer"]
    for group, pod in zip(spec["replicatedJobs"], (server, trainer), strict=True):
        jobs, container = group["template"]["spec"], pod["containers"][0]
        assert (jobs["completionMode"], jobs["completions"], jobs["parallelism"]) == ("Indexed", 2, 2)
        values = {one["name"]: one.get("value") for one in container["env"]}
        assert values["ROLLOUT_HOST_1"] == "run-server-0-1.run"
        assert values["COORDEXP_API_KEY"] is None, "a token is read from a secret and never written"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    serving = server["containers"][0]
    assert '--index "$JOB_COMPLETION_INDEX" --host "$POD_IP"' in serving["command"][2]
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in serving["env"]
    assert '--rdzv-endpoint="run-trainer-0-0.run:29500"' in trainer["containers"][0]["command"][2]
    assert trainer["terminationGracePeriodSeconds"] == JOB.grace_s


def test_the_shipped_configuration_gives_a_job_of_each_kind(tmp_path: Path, cli: Cli) -> None:
    job = plan_job(CONFIG, (RESUME,), trainer_nodes=2, gpus=8, time_limit="1-00:00:00")
    assert (job.servers, job.nodes, job.token_variable) == (2, 4, "COORDEXP_API_KEY")
    assert job.name == "stage2-multi-node" and job.grace_s == 315
    for name, flags in {"slurm": [], "kubernetes": ["--image", "i"], "skypilot": ["--accelerator", "H200"]}.items():
        done = cli("launch", "--config", CONFIG, "--for", name, "--learner-nodes", "2", *flags, RESUME)
        assert done.code == 0, done.err
        assert done.out == render(job, name, "i", "H200")  # type: ignore[arg-type]
        (tmp_path / name).write_text(done.out)
    assert subprocess.run(["bash", "-n", str(tmp_path / "slurm")]).returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--gpus", "4"), "--gpus has no use here; it belongs to --for slurm or kubernetes or skypilot"),
     (("--for", "kubernetes", "--image", "i", "--time", "4:00"), "--time has no use here; it belongs to --for slurm"),
     (("--for", "slurm", "--host", "::1"), "--host has no use here; it is not for --for slurm")],
)  # fmt: skip
def test_an_option_of_another_job_is_refused(words: tuple[str, ...], says: str, cli: Cli) -> None:
    refused = cli("launch", "--config", CONFIG, *words, RESUME)
    assert refused.code == 2 and says in refused.err and not refused.out


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # keys of the YAML, options of the command, error
    "a restarted job would not resume": ({RESUME_KEY: None}, {}, RESUME_KEY),
    "a host that is written down": (
        {"rollout_matching.vllm.server.servers": [{"base_url": "http://10.0.0.1:8000", "group_port": 51216}]},
        {},
        r"servers\[0\].base_url: .*ROLLOUT_HOST_0:-rollout-host-0",
    ),
    "a server without a token": ({"rollout_matching.vllm.server.api_key_env": None}, {}, "server.api_key_env"),
    "swift's servers": ({"launch.server": "swift"}, {}, "launch.server"),
    "engines that do not fit": ({"rollout_matching.vllm.tensor_parallel_size": 3}, {}, "size: 3.*--gpus"),
    "a batch that does not divide": ({}, {"trainer_nodes": 3}, "batch_size: 256 .* 4 x 24 .*nodes 3, --gpus 8"),
    "answers for fewer than the trainers": (
        {"rollout_matching.decode_batch_size": 1, "rollout_matching.vllm.tensor_parallel_size": 1},
        {"trainer_nodes": 4},
        "decode_batch_size 1 on 16 rollout devices .* at least 2",
    ),
    "no trainer": ({}, {"trainer_nodes": 0}, "--learner-nodes 0"),
    "fewer than no GPUs": ({}, {"gpus": -1}, "--gpus -1"),
    "a time that is none": ({}, {"time_limit": "one day"}, "--time one day"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_invalid_cluster_settings_are_refused_with_their_key(tmp_path: Path, name: str) -> None:
    keys, options, message = CASES[name]
    config = set_keys({"extends": str(CONFIG), "training": {"resume_from_checkpoint": True}}, keys)
    given = {"trainer_nodes": 1, "gpus": 8, "time_limit": "4:00:00", **options}
    with pytest.raises(ConfigError, match=message):
        plan_job(write_yaml(tmp_path, config), (), **given)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("Big_Run.2", "big-run-2"), ("2026-11-28", "coordexp-2026-11-28"), ("007", "coordexp-007")),
        *(("null", "coordexp-null"), ("x" * 39 + "-y", "x" * 39)),
    ],
)
def test_a_job_has_a_name_that_schedulers_accept(tmp_path: Path, folder: str, name: str) -> None:
    job = plan_job(CONFIG, (RESUME, f"training.output_dir={tmp_path / folder}"), 1, 8, "4:00:00")
    assert job.name == name and yaml.safe_load(render(job, "kubernetes", image="i"))["metadata"]["name"] == name


def test_reading_a_configuration_does_not_change_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_HOST_0", "mine")
    before = dict(os.environ)
    plan_job(CONFIG, (RESUME,), 1, 8, "4:00:00")
    assert dict(os.environ) == before


@pytest.mark.parametrize(("scheduler", "flag"), [("kubernetes", "--image"), ("skypilot", "--accelerator")])
def test_missing_scheduler_options_are_named(scheduler: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        render(JOB, scheduler)


@pytest.mark.parametrize(
    ("limit", "grace_s", "is_refused"),
    [("00:02:00", 60, True), ("0-00:02:01", 60, False), ("0-00:00:00", 60, True), ("30-00:00:00", 65475, True)],
)
def test_a_slurm_job_has_time_to_train_before_it_has_to_save(limit: str, grace_s: int, is_refused: bool) -> None:
    """USR1 arrives grace_s + 60 seconds before the limit; SLURM counts at most 65535. Too early, the job would only
    ever save and queue again."""
    job = replace(JOB, time_limit=limit, grace_s=grace_s)
    if is_refused:
        with pytest.raises(ConfigError, match=f"--time {limit}: .*training.stop_within_s"):
            render(job, "slurm")
    else:
        assert "#SBATCH --signal=B:USR1@120\n" in render(job, "slurm")


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "skypilot"])
@pytest.mark.parametrize("argument", ["a=x\nsetup: rm -rf /", "a=it's", "a=b: {c", "a=\n\n  d", 'a="#$(e)'])
def test_any_argument_reaches_the_trainer_as_it_is(scheduler: cluster.Scheduler, argument: str) -> None:
    job = replace(JOB, arguments=(argument,))
    text = render(job, scheduler, image="i:1", accelerator="H100")
    if scheduler == "slurm":
        scripts = [text]
    elif scheduler == "skypilot":
        (document,) = yaml.safe_load_all(text)
        assert document["setup"] == "pip install '.[vllm]'"
        scripts = [document["run"]]
    else:
        (document,) = yaml.safe_load_all(text)
        scripts = [container["command"][2] for pod in pods(document) for container in pod["containers"]]
    for script in scripts:
        quoted = shlex.quote(argument)
        assert (quoted.replace("$", "$$") if scheduler == "kubernetes" else quoted) in script
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=20).returncode == 0


def test_kubernetes_expands_no_dollar_of_an_argument_and_reads_every_character() -> None:
    """Kubernetes replaces $(NAME) and reads $$ as $; a YAML escape cannot hold half a character."""
    job = replace(JOB, arguments=("a=$(POD_IP) $$ \U0001f600",))
    (document,) = yaml.safe_load_all(render(job, "kubernetes", image="i"))
    for pod in pods(document):
        assert "'a=$$(POD_IP) $$$$ \U0001f600'" in pod["containers"][0]["command"][2]


def test_the_name_of_a_tokens_variable_is_text() -> None:
    """NO is a boolean in YAML 1.1, in which schedulers read."""
    job = replace(JOB, token_variable="NO")
    (document,) = yaml.safe_load_all(render(job, "kubernetes", image="i"))
    for pod in pods(document):
        assert pod["containers"][0]["env"][-1]["name"] == "NO"
    (document,) = yaml.safe_load_all(render(job, "skypilot", accelerator="H100"))
    assert document["secrets"] == {"NO": None}


@pytest.mark.parametrize("name", ["H100: x", "A\nsetup: y", "{", "#", "H100"])
def test_an_accelerators_name_stays_a_name(name: str) -> None:
    (document,) = yaml.safe_load_all(render(JOB, "skypilot", accelerator=name))
    assert document["resources"]["accelerators"] == f"{name}:8"
