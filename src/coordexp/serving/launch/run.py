"""``coordexp launch``: hands the plan to a supervisor, forwards signals to it, and outlives it only to tidy up."""

from __future__ import annotations

import signal
import subprocess
import sys

from coordexp.serving.launch.plan import LaunchPlan
from coordexp.serving.launch.processes import adopt_orphans, end_descendants, exit_code


def run_plan(plan: LaunchPlan) -> int:
    """Run ``plan`` to its end; returns the learner's exit code.

    Whatever happens, nothing that was started is left: the supervisor ends everything when this process is gone, and
    this process, which adopts what a killed supervisor leaves, ends the rest.
    """
    adopt_orphans()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "coordexp.serving.launch.supervisor"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )
    assert supervisor.stdin is not None
    handlers = {
        number: signal.signal(number, lambda received, _: supervisor.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        supervisor.stdin.write(plan.to_json().encode() + b"\n")
        supervisor.stdin.flush()
        return exit_code(supervisor.wait())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
        supervisor.stdin.close()
        end_descendants(grace_s=0.0)
