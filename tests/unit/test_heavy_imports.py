from __future__ import annotations

import gc
import importlib.metadata
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.utils
from transformers.utils.import_utils import define_import_structure

from coordexp.heavy_imports import heavy_imports, import_structure, packages_distributions, process_is_a_command


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_also_after_an_error(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ModuleNotFoundError), heavy_imports():
            assert not gc.isenabled()
            import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_of_the_caller_is_collected_afterwards() -> None:
    """A detector's model, for example, which was closed before another one is opened."""

    class Closed:
        def __init__(self) -> None:
            self.own = self

    left = weakref.ref(Closed())
    with heavy_imports():
        pass
    gc.collect()
    assert left() is None


SPINS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "demo-stage1"


def imported(before: str) -> str:
    """Which of these a new process has imported, whether its modules are passed over by garbage collection, and how
    often torch may spin."""
    code = (
        f"import gc, os, sys\n{before}\n"
        "from coordexp.heavy_imports import heavy_imports\n"
        "with heavy_imports():\n"
        "    from transformers import AutoProcessor, Trainer\n"
        f"    AutoProcessor.from_pretrained({str(CHECKPOINT)!r})\n"
        "    spins = os.environ.get('GOMP_SPINCOUNT')\n"
        "heavy = {'datasets', 'mistral_common', 'pandas', 'peft', 'scipy', 'sklearn', 'transformers'}\n"
        "print(*sorted(heavy & set(sys.modules)), gc.get_freeze_count() > 0, spins)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SPINS}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_a_command_imports_nothing_that_it_does_not_need() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("datasets")
    pytest.importorskip("mistral_common")
    assert (
        imported("from coordexp.heavy_imports import process_is_a_command as own; own()") == "transformers True 10000"
    )


@pytest.mark.parametrize(
    ("given", "inside"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_a_command_spin_briefly_unless_the_user_says_how_long(
    given: dict[str, str], inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads the variable once, as torch is imported; processes that a command starts decide for themselves."""
    process_is_a_command()
    for name in SPINS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with heavy_imports():
        assert os.environ.get("GOMP_SPINCOUNT") == inside
    assert {name: os.environ[name] for name in SPINS if name in os.environ} == given


def test_a_process_of_the_user_is_left_as_it_is() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("datasets")
    pytest.importorskip("mistral_common")
    assert imported("") == "datasets mistral_common pandas peft scipy sklearn transformers False None"


def test_transformers_knows_them_afterwards() -> None:
    process_is_a_command()
    before = transformers.utils.is_sklearn_available
    with heavy_imports():
        assert not transformers.utils.is_sklearn_available()
    assert transformers.utils.is_sklearn_available is before


def test_packages_and_models_are_found_without_reading_them_again() -> None:
    found = packages_distributions()
    assert {name: found[name] for name in ("PIL", "torch", "transformers")} == {
        "PIL": ["pillow"], "torch": ["torch"], "transformers": ["transformers"],
    }  # fmt: skip
    if sys.version_info < (3, 12):  # later ones list more kinds of files
        assert found == importlib.metadata.packages_distributions()
    read: list[Any] = []

    def define(path: Any, prefix: str | None = None) -> Any:
        read.append(prefix)
        return define_import_structure(path, prefix)

    models = Path(transformers.__file__).with_name("models") / "__init__.py"
    assert import_structure(define, str(models)) == define_import_structure(str(models))
    assert read == ["models"]


def test_threads_that_import_at_once_leave_transformers_and_collection_as_they_were() -> None:
    process_is_a_command()
    before, collects = transformers.utils.is_sklearn_available, gc.isenabled()
    inside, may_leave, first_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with heavy_imports():
            inside.set()
            may_leave.wait(60)
        first_left.set()

    def second() -> None:
        with heavy_imports():
            first_left.wait(60)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    may_leave.set()
    for thread in threads:
        thread.join(60)
    assert transformers.utils.is_sklearn_available is before and gc.isenabled() is collects
