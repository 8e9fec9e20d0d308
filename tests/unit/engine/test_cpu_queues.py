"""vLLM's queues between CPU processes: a reader that waits leaves the core to the process that it waits for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM's own queue")

from vllm.platforms import current_platform

from coordexp.engine import cpu
from coordexp.engine.cpu import nap_s, wait_asleep

if not current_platform.is_cpu():
    pytest.skip("beside a GPU vLLM's queues stay as they are", allow_module_level=True)


@pytest.fixture
def queue_pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """vLLM's queue, once written and read: from then on it expects the next message at once."""
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)  # given back afterwards
    wait_asleep()
    wait_asleep()  # twice is once
    writer: Any = shm_broadcast.MessageQueue(1, 1)
    reader: Any = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(20)
    writer.enqueue("first")
    assert reader.dequeue(timeout=20) == "first"
    return writer, reader


def test_waiting_looks_seldom_and_the_message_comes(
    queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queue_pair
    looks, wait = [], reader._spin_condition.wait
    monkeypatch.setattr(reader._spin_condition, "wait", lambda *args, **kw: looks.append(1) or wait(*args, **kw))
    threading.Timer(0.5, lambda: writer.enqueue({"bucket": 2})).start()
    assert reader.dequeue(timeout=60) == {"bucket": 2}
    assert 1 <= len(looks) < 50_000, "vLLM would look as often as it can: about a million times"


def test_a_lost_note_costs_little(queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's note gets lost: what it wrote is found all the same, not only after vLLM's own five seconds."""
    writer, reader = queue_pair
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    threading.Timer(0.2, lambda: writer.enqueue(3)).start()
    assert reader.dequeue(timeout=3) == 3


@pytest.mark.parametrize(
    ("waited_s", "expected_s"),
    [
        (0.02, 0.0025),  # an eighth of what was waited
        (0.9, 0.005),
    ],
)
def test_naps_grow_with_the_wait(waited_s: float, expected_s: float) -> None:
    assert nap_s(waited_s) == pytest.approx(expected_s)


def test_an_idle_queue_is_woken_by_its_writers_note(
    queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "DOZE_S", 0.1)
    monkeypatch.setattr(cpu, "IDLE_MS", 40_000)
    writer, reader = queue_pair
    threading.Timer(1.0, lambda: writer.enqueue(4)).start()
    assert reader.dequeue(timeout=20) == 4
