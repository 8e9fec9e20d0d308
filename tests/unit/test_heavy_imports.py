from __future__ import annotations

import gc

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
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
