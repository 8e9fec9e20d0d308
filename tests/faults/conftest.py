"""Reports of faults to the campaign, ``make faults``."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def seen(record_property: Any) -> Any:
    """Tells the campaign's table what was seen."""
    return lambda what: record_property("seen", " ".join(str(what).split())[:160])
