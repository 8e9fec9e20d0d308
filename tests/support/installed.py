"""Tests whose subject needs a package that `make setup EXTRAS=dev` leaves out."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where one of ``packages`` is not installed. Imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
