"""One process runs many test files: what importing one of them does to the libraries must not reach the others."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

# What a user keeps between starts is none of the tests' business, nor theirs the user's.
_CACHE = tempfile.TemporaryDirectory(prefix="coordexp-tests-cache-")
os.environ["COORDEXP_CACHE"] = _CACHE.name


pytest.register_assert_rewrite("support.guarded_server")


def pytest_collection_finish() -> None:
    """ms-swift's trainers replace methods of ``transformers.Trainer`` as they are imported."""
    if "swift.trainers" in sys.modules:
        raise pytest.UsageError(
            "a test file imports ms-swift's trainers, which patch transformers.Trainer for every other test: import "
            "them in a process of their own"
        )
