from __future__ import annotations

import pytest

from coordexp.modeling.load import LoadedModel
from support.tiny_run import load_tiny


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny()
