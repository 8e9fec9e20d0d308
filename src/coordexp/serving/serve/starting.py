"""Several vLLM engines of one process, started side by side.

An engine's process takes its devices from this process's environment at the moment when it is spawned, and dies with
the thread that spawned it. So each has a thread of its own, which lives as long as the engine may, and the environment
belongs to one thread after the other until its process is there; loading and warming up, the long part, go on
together.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from coordexp.errors import RolloutError

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORE = "EngineCore"  # what vLLM calls an engine's process
SPAWN_S = 600.0  # reading the model's configuration, tokenizer and processor comes before
POLL_S = 0.05
END_S = 30.0


class EngineThreads:
    """The threads that started a server's engines. Keep it as long as the engines are to live."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def start(self, start_one: Callable[[], Any], devices: Sequence[str | None], ready_s: float) -> list[Any]:
        """``start_one()`` once for each of ``devices`` (None leaves the environment as it is), and what came of them.
        ``ready_s``: seconds that they may load and warm up, once all of their processes are there.

        Raises: the first failure, after everything that had started has been ended. RolloutError: a process of an
            engine does not come up, or an engine is not ready in time.
        """
        before = os.environ.get(VISIBLE)
        outcomes: list[Future[Any]] = []
        try:
            for visible in devices:
                if visible is not None:
                    os.environ[VISIBLE] = visible
                outcomes.append(self._spawn(start_one))
            loading = wait(outcomes, timeout=ready_s, return_when=FIRST_EXCEPTION).not_done
            failed = next((one for one in outcomes if one.done() and one.exception() is not None), None)
            if failed is None and loading:
                raise RolloutError(
                    f"{len(loading)} of {len(outcomes)} engines were not ready within {ready_s:g} s "
                    "(launch.wait_s); look into the log above, or allow more seconds there"
                )
            return [outcome.result() for outcome in ([failed] if failed is not None else outcomes)]
        except BaseException:
            self._end(outcomes)
            raise
        finally:
            if before is not None:
                os.environ[VISIBLE] = before
            else:
                os.environ.pop(VISIBLE, None)

    def close(self) -> None:
        """Let the threads go; call it when their engines have ended. Safe to call twice."""
        self._ended.set()

    def _spawn(self, start_one: Callable[[], Any]) -> Future[Any]:
        """Start one, and wait until its process is there or it has failed."""
        outcome: Future[Any] = Future()
        known = {child.pid for child in _cores()}
        threading.Thread(target=self._run, args=(start_one, outcome), name="engine-start", daemon=True).start()
        deadline = time.monotonic() + SPAWN_S
        while not outcome.done() and not any(child.pid not in known for child in _cores()):
            if time.monotonic() > deadline:
                raise RolloutError(f"an engine's process was not there within {SPAWN_S:g} s; look into the log above")
            time.sleep(POLL_S)
        return outcome

    def _run(self, start_one: Callable[[], Any], outcome: Future[Any]) -> None:
        try:
            outcome.set_result(start_one())
        except BaseException as error:  # raised again where the outcome is asked for
            outcome.set_exception(error)
        self._ended.wait()

    def _end(self, outcomes: Sequence[Future[Any]]) -> None:
        """End what has started, and what is starting: its thread then finds its process gone."""
        deadline = time.monotonic() + END_S
        for child in _cores():
            child.kill()
            child.join(max(0.0, deadline - time.monotonic()))
        for outcome in outcomes:
            while not outcome.done() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if outcome.done() and outcome.exception() is None:
                outcome.result().shutdown(timeout=5.0)
        self.close()


def _cores() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith(CORE)]
