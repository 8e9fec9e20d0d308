"""Patches of vLLM on CPUs: waiting processes sleep, each run has its own shared memory names, and drafted positions
are sampled at their request's temperature."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is what is patched")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from coordexp.engine.worker import cpu_patches

if not current_platform.is_cpu():
    pytest.skip("vLLM is not patched on a GPU machine", allow_module_level=True)

WORKER = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from coordexp.heavy_imports import heavy_imports, process_is_a_command
process_is_a_command()
with heavy_imports():
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    import coordexp.engine.worker.cpu_patches

rank, store, function = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ["VLLM_DIST_IDENT"] = "//"  # set by vLLM's worker under torchrun
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + store)
group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1], world_size=2, rank=rank, device_group=dist.group.WORLD)
total = torch.full((1024,), rank + 1.0)
if hasattr(torch.ops._C, "init_shm_manager"):  # not without AVX-512, where vLLM's workers use gloo
    memory = _CPUSHMDistributed(group)
    dist.barrier()
    assert memory.group_name != "//-tp:0-[0-1]-cpushm"  # vLLM's, the same in every run
    unique = memory.group_name.rpartition("]")[2]
    assert not list(coordexp.engine.worker.cpu_patches.SHARED_MEMORY.glob("*" + unique + "*"))
    memory.all_reduce(total)
else:
    dist.all_reduce(total)

def doubled_sum(x):
    return (2 * x).sum()

numbers = torch.arange(4.0)
if rank == 0:
    compiled = torch.compile(doubled_sum, fullgraph=True).aot_compile(((numbers,), {}))
    compiled.save_compiled_function(str(function))
dist.barrier()
with function.open("rb") as file:
    compiled = torch.compiler.load_compiled_function(file)
compiled._artifacts.compiled_fn.finalize_loading(None)  # as vLLM does
print(total.unique().tolist(), compiled(numbers).item())
"""


def test_engines_of_one_machine_share_memory_and_stored_functions(tmp_path: Path) -> None:
    """Shared memory has a unique name and is removed, because one that a killed run left behind would stop the next
    run. A stored compiled function is usable by another process; otherwise vLLM would compile again."""
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path / "f")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [worker.communicate(timeout=240)[0].splitlines()[-1:] for worker in workers] == [[b"[3.0] 12.0"]] * 2


def test_each_drafted_position_has_its_requests_temperature() -> None:
    temperatures = torch.tensor([1.5, 0.0, 0.7])
    ends = torch.tensor([2, 3, 3], dtype=torch.int32)  # two drafted tokens, one, none
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 3, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([1.5, 1.5, 1.0]))
    top_k = torch.tensor([20, 0, 5], dtype=torch.int32)
    assert rejection_sampler.expand_batch_to_tokens(top_k, ends, 3).tolist() == [20, 20, 0]


def test_a_step_without_drafts_may_have_a_top_k() -> None:
    temperatures, top_k = torch.tensor([1.0, 0.5]), torch.tensor([1, 3], dtype=torch.int32)
    metadata: Any = SimpleNamespace(all_greedy=False, temperature=temperatures, top_k=top_k, top_p=None)
    nothing, ends = torch.empty(0, 8), torch.tensor([0, 0], dtype=torch.int32)
    assert rejection_sampler.apply_sampling_constraints(nothing, ends, metadata).shape == (0, 8)
    two, ends = torch.arange(16.0).reshape(2, 8), torch.tensor([1, 2], dtype=torch.int32)
    kept = rejection_sampler.apply_sampling_constraints(two, ends, metadata)
    assert kept.isfinite().sum(dim=1).tolist() == [1, 3]


def test_padding_of_a_draft_is_rejected() -> None:
    """Two drafted tokens and two of padding; all tokens have one, the last of the vocabulary, for certain."""
    current_platform.register_triton_kernel_overrides()  # as workers do
    probs = torch.eye(8)[[7, 7, 7, 7]]
    drafts, ends = torch.tensor([7, 7, -1, -1], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32)
    recovered, sampled = torch.full_like(drafts, 5), torch.full((2, 3), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        sampled, ends, drafts, None, probs, torch.tensor([[6], [6]]), recovered,
        torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([False, False]), 2, None,
    )  # fmt: skip
    assert sampled.tolist() == [[7, 7, 6], [5, -1, -1]]


@pytest.fixture
def queue_pair() -> tuple[Any, Any]:
    """vLLM's queue, once written and read: from then on it expects the next message at once."""
    writer: Any = shm_broadcast.MessageQueue(1, 1)
    reader: Any = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(20)
    writer.enqueue("first")
    assert reader.dequeue(timeout=20) == "first"
    return writer, reader


def test_waiting_polls_rarely_and_receives_the_message(
    queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queue_pair
    looks, wait = [], reader._spin_condition.wait
    monkeypatch.setattr(reader._spin_condition, "wait", lambda *args, **kw: looks.append(1) or wait(*args, **kw))
    threading.Timer(0.5, lambda: writer.enqueue({"bucket": 2})).start()
    assert reader.dequeue(timeout=60) == {"bucket": 2}
    assert 1 <= len(looks) < 50_000, "vLLM itself would poll about a million times"


def test_a_lost_notification_costs_little_time(queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the writer's notification is lost, the message is still found before vLLM's own five seconds."""
    writer, reader = queue_pair
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    threading.Timer(0.2, lambda: writer.enqueue(3)).start()
    assert reader.dequeue(timeout=3) == 3


def test_an_idle_queue_is_woken_by_the_writer(queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_patches, "BACKOFF_S", 0.1)
    monkeypatch.setattr(cpu_patches, "IDLE_MS", 40_000)
    writer, reader = queue_pair
    threading.Timer(1.0, lambda: writer.enqueue(4)).start()
    assert reader.dequeue(timeout=20) == 4
