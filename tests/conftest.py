"""Order and sharing of test files that run in one process."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.rollout_servers import PlainServer

# Tests do not use the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="coordexp-tests-cache-")
os.environ["COORDEXP_CACHE"] = _CACHE.name
# Nor a network: support.hub serves models of the hub, in a process of its own.
os.environ["HF_HUB_OFFLINE"] = "1"


# A busy machine is not a failure.
settings.register_profile("default", deadline=None)

pytest.register_assert_rewrite("support.guarded_server")

# Several files on one server: a worker runs them together, in this order. Adapters are first because they do not fit on
# full weights that were pushed; the last file kills the server.
ON_PLAIN_SERVER = (
    "tests/integration/test_adapter_push.py",
    "tests/integration/test_weight_push.py",
    "tests/integration/test_rollouts_ahead.py",
    "tests/faults/test_real_servers.py",
    "tests/integration/test_served_endpoints.py",
)
# Files with processes of ms-swift, which a worker imports once, in 20 s.
ON_SWIFT = (
    "tests/integration/test_swift_rollout.py",
    "tests/integration/test_predict_by_servers.py",
    "tests/integration/test_pinned_names.py",
)
# Files that take minutes are first, so that no worker begins one when the other has nothing left.
FIRST = (
    "tests/as_shipped/test_servers.py",
    "tests/as_shipped/test_commands.py",
    "tests/integration/test_server_rollouts.py",
    "tests/integration/test_colocated_rollouts.py",
    *ON_PLAIN_SERVER,
    "tests/integration/test_colocated_adapters.py",
    "tests/integration/test_torchrun.py",
    "tests/integration/test_predict_in_vllm.py",
    "tests/integration/test_openai_server.py",
    "tests/integration/test_skipped_tokens.py",
    *ON_SWIFT,
    "tests/integration/test_launch_swift.py",
    "tests/integration/test_server_faults.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_doctor.py",
    "tests/integration/test_notebook.py",
    "tests/integration/test_walks.py",
    "tests/fake_cuda/test_shipped_on_gpu.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_lost_processes.py",
    "tests/unit/training/test_resume.py",
    "tests/unit/training/test_rollouts_ahead.py",
    "tests/integration/test_benchmark_scripts.py",
    "tests/as_shipped/test_rows.py",
)
# Tests that share nothing: a worker takes one at a time.
ONE_BY_ONE = ("tests/as_shipped/test_rows.py", "tests/as_shipped/test_commands.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "campaign: takes long; started by `make faults` alone")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("COORDEXP_CAMPAIGN") != "1":
        late = [item for item in items if item.get_closest_marker("campaign") is not None]
        items[:] = [item for item in items if item.get_closest_marker("campaign") is None]
        config.hook.pytest_deselected(items=late)
    if unsteady := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"ids with addresses differ between pytest's processes; give ids=[…]: {unsteady[0]}")
    place = {file: number for number, file in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(file_of(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Like ``--dist loadfile``, but files of a group count as one file, and some tests as files."""
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if file_of(nodeid) in ONE_BY_ONE:
                return nodeid
            file = file_of(nodeid)
            return next((group[0] for group in (ON_PLAIN_SERVER, ON_SWIFT) if file in group), file)

    return Sharing(config, log) if config.getoption("dist") == "loadfile" else None


# An engine collects garbage nine times from its start to its end, and unfreezes at its end what was frozen. Each time
# took 0.3 s in a process with all modules and collected tests, which these collections now pass over.
_freeze = gc.freeze
_MANY_MODULES = 300
_modules_frozen = 0


def _freeze_modules() -> None:
    global _modules_frozen
    if len(sys.modules) - _modules_frozen > _MANY_MODULES:
        _modules_frozen = len(sys.modules)
        gc.collect()
        _freeze()


@pytest.fixture(scope="module", autouse=True)
def _modules_are_frozen() -> None:
    _freeze_modules()  # between files, so that no engine is frozen


@pytest.fixture(scope="module", autouse=True)
def _settings_stay_in_their_file() -> Iterator[None]:
    """A file that leaves a variable of this project behind changes what later files of the same process start."""

    def ours() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("COORDEXP_")}

    before = ours()
    yield
    assert ours() == before


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    """The server of :data:`ON_PLAIN_SERVER`."""
    from support.rollout_servers import PlainServer

    plain = PlainServer(tmp_path_factory.mktemp("server"))
    yield plain
    plain.close()


def pytest_collection_finish() -> None:
    """Later garbage collections pass over modules and collected tests. And ms-swift's trainers must not be there: they
    replace methods of ``transformers.Trainer`` as they are imported."""
    _freeze_modules()
    gc.freeze = gc.unfreeze = lambda: None
    if "swift.trainers" in sys.modules:
        raise pytest.UsageError(
            "a test file imports ms-swift's trainers, which patch transformers.Trainer for every other test: import "
            "them in a process of their own"
        )
