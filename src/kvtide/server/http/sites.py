"""Which web pages may ask a server that asks nobody for a token: its own.

A name that an attacker owns may lead to this machine (DNS rebinding), and then a browser takes us for the attacker's
own site. It still says the name: as Host, and as Origin where a page of another site asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvtide.errors import RequestRefused

# Addresses, names without a dot and those below localhost: nobody can own one on the Internet.
_OURS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|\d{1,3}(?:\.\d{1,3}){3}|[\w-]+|(?:[\w-]+\.)+localhost)(?::\d{1,5})?")


class AllowedHosts:
    """Checks the names in requests, or lets all pass where names are no protection: tokens are."""

    def __init__(self, is_checked: bool) -> None:
        self._is_checked = is_checked

    def check(self, headers: Mapping[str, str]) -> None:
        """RequestRefused (421) for a request that a page of another site may have sent."""
        if not self._is_checked:
            return
        host = headers.get("host", "localhost")
        if not _OURS.fullmatch(host):
            raise RequestRefused(421, f"this server is not called {host[:80]!r}; --open-to-all takes any name")
        if headers.get("origin", f"http://{host}").partition("://")[2] != host:
            raise RequestRefused(421, "a page of another site may not ask this server; --open-to-all lets it")
