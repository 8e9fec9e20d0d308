"""URLs and the hosts in them, from configurations, requests and other people's files; options of connections."""

from __future__ import annotations

import socket
from urllib.parse import SplitResult, urlsplit

from coordexp.errors import ConfigError

# Options of a connection: a machine that disappears is noticed after about two minutes, even without a timeout.
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, option), value)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6))
        if hasattr(socket, option)
    ),
]


def split_url(url: str) -> SplitResult:
    """The parts of a URL; of ``//HOST:PORT`` for a host alone. Its ``port`` is a number or None. Raises ConfigError,
    which does not repeat the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only here
    except ValueError:
        raise ConfigError(
            "cannot be read as an address; write http://HOST:PORT with a port of 0 to 65535, and an IPv6 address in "
            "brackets: http://[::1]:8000"
        ) from None
    return parts
