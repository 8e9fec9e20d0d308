"""The list of upstream names: all are there in the installed versions, and a missing one is named."""

from __future__ import annotations

import pytest

from coordexp.engine.compatibility import VLLM_SERVER, UpstreamName, check_upstream, versions
from coordexp.errors import MissingDependency, UpstreamChanged


def test_the_installed_vllm_has_every_name() -> None:
    pytest.importorskip("vllm")
    check_upstream(VLLM_SERVER)


def test_names_that_moved_are_listed_with_their_purpose() -> None:
    gone = (
        UpstreamName("json", "JSONDecoder.decode", "reading"),
        UpstreamName("json", "JSONDecoder.understand", "reading"),
        UpstreamName("json.deeper", "x", "more"),
    )
    with pytest.raises(UpstreamChanged) as refused:
        check_upstream(gone)
    message = str(refused.value)
    assert "json.JSONDecoder.understand (for reading)" in message and "json.deeper.x (for more)" in message
    assert "JSONDecoder.decode" not in message and "0.32.0" in message


def test_a_missing_package_says_how_to_get_it() -> None:
    with pytest.raises(MissingDependency, match=r"coordexp\[vllm\]"):
        check_upstream((UpstreamName("no_such_package_here", "x", "y"),))


def test_an_untested_version_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check_upstream((UpstreamName("yaml", "safe_load", "reading"),))  # a package that no list of tested versions has
    assert "not tested" in caplog.text


def test_versions_name_what_is_installed() -> None:
    assert versions()["torch"] and versions()["coordexp"]
