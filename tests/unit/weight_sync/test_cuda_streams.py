"""Order of CUDA streams in weight pushes, with stand-ins for torch.cuda and vLLM's binding of NCCL."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.weight_sync import group
from coordexp.weight_sync.buckets import computed_by_now
from coordexp.weight_sync.group import Communicator, GroupAddress
from coordexp.weight_sync.receiver import WeightReceiver
from support.fused_model import FakeWeights, FusedModel

GPU = torch.device("cuda", 0)
Log = list[tuple[Any, ...]]


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.of))


class Event:
    def __init__(self, log: Log) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        self.of = stream.name
        self.log.append((stream.name, "records"))

    def query(self) -> bool:
        return True


class Part:
    """Bytes on a GPU, sent or received."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def numel(self) -> int:
        return 8

    def record_stream(self, stream: Stream) -> None:
        self.log.append((stream.name, "holds the memory"))


class Store:
    """Of a group that rank 0 has opened."""

    def __init__(self, *_: Any) -> None: ...
    def set(self, key: str, value: bytes | str) -> None: ...
    def wait(self, keys: Any) -> None: ...
    def close(self) -> None: ...
    def get(self, key: str) -> bytes:
        return b"00"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log: Log = []
    made: list[Stream] = []
    trainers = Stream(log, "trainer")

    def stream(device: Any) -> Stream:
        made.append(Stream(log, f"group {len(made)}"))
        return made[-1]

    main, loaders = threading.get_ident(), Stream(log, "loader")
    cuda = SimpleNamespace(
        Stream=stream,
        Event=lambda: Event(log),
        current_stream=lambda device: trainers if threading.get_ident() == main else loaders,
        set_device=lambda device: None,
        synchronize=lambda device: None,
    )
    monkeypatch.setattr(torch, "cuda", cuda)

    def broadcast(part: Any, source: int, on: Stream) -> None:
        log.append((on.name, "broadcasts"))

    nccl = SimpleNamespace(broadcast=broadcast, destroy=lambda: None)
    binding: Any = ModuleType("pynccl")
    binding.PyNcclCommunicator = SimpleNamespace(from_unique_id_bytes=lambda *_: nccl)
    wrapper: Any = ModuleType("pynccl_wrapper")
    wrapper.NCCLLibrary = object
    for module in (binding, wrapper):
        monkeypatch.setitem(sys.modules, f"vllm.distributed.device_communicators.{module.__name__}", module)
    monkeypatch.setattr(group, "RendezvousStore", Store)
    return log


def trainers_end(port: int) -> Communicator:
    return group.join(GroupAddress("127.0.0.1", port, 1, 2, 5.0), GPU)


def test_each_group_sends_on_a_stream_of_its_own_after_what_it_sends_is_computed(log: Log) -> None:
    for name, one in (("group 0", trainers_end(1)), ("group 1", trainers_end(2))):
        log.clear()
        parts: Any = [Part(log), Part(log)]
        one.broadcast(parts, 1)
        each = [(name, "holds the memory"), (name, "broadcasts"), (name, "records")]
        assert log == [(name, "waits for", "trainer"), *each, *each]


def test_weights_of_this_process_are_loaded_after_they_are_computed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread with a stream of its own. A merged adapter may still be on its way."""
    source, model = FakeWeights(), FusedModel()
    load = model.load_weights
    monkeypatch.setattr(model, "load_weights", lambda named: log.append(("loader", "loads")) or load(named))
    receiver = WeightReceiver(model, GPU, sharded=True)
    receiver.take(list(source.values.items()))
    receiver.commit(1, False, lambda: None)
    assert log[:3] == [("trainer", "records"), ("loader", "waits for", "trainer"), ("loader", "loads")]
    assert computed_by_now(torch.device("cpu")) is None
