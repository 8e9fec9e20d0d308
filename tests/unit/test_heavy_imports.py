from __future__ import annotations

import gc
import weakref

import pytest

from coordexp.heavy_imports import heavy_imports


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
