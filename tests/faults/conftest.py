"""Faults that take long wait for the campaign: ``make faults``."""

from __future__ import annotations

import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "campaign: takes long; injected by `make faults` alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("COORDEXP_CAMPAIGN") == "1":
        return
    late = [item for item in items if item.get_closest_marker("campaign") is not None]
    if late:
        items[:] = [item for item in items if item.get_closest_marker("campaign") is None]
        config.hook.pytest_deselected(items=late)


@pytest.fixture
def seen(record_property: Any) -> Any:
    """Tells the campaign's table what was seen."""
    return lambda what: record_property("seen", " ".join(str(what).split())[:160])
