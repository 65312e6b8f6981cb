"""Lets requests in: who asks, on whose account, how often, and when it is their turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from kvtide.errors import RequestRefused
from kvtide.server.http.doors import ConnectionLimits, Guest, account_of
from kvtide.server.http.exchange import Exchange
from kvtide.server.http.shares import HEALTH, STRANGERS, Rates, Turns
from kvtide.server.live import Live
from kvtide.wire.protocol import PageRoute, parse_target

# Addresses, names without a dot and those below localhost: nobody can own one on the Internet.
_OURS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|\d{1,3}(?:\.\d{1,3}){3}|[\w-]+|(?:[\w-]+\.)+localhost)(?::\d{1,5})?")


class AllowedHosts:
    """Which web pages may ask a server that asks nobody for a token: its own. All may where tokens protect it.

    A name that an attacker owns may lead to this machine (DNS rebinding), and then a browser takes us for the
    attacker's own site. It still says the name: as Host, and as Origin where a page of another site asks.
    """

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


class Reception:
    """Asks every request for a token. Runs on the event loop."""

    def __init__(self, live: Live, doors: ConnectionLimits, turns: Turns, sites: AllowedHosts) -> None:
        self._live = live
        self._sites = sites
        self._doors = doors
        self._turns = turns
        self._rates = Rates(lambda: live.limits.tenant_requests_s_max)
        self._stranger_rates = Rates(lambda: live.limits.stranger_requests_s_max)

    async def let_in(self, exchange: Exchange, guest: Guest, common_name: str | None) -> None:
        """Note route, caller and owner of a request whose turn it is.

        RequestRefused for a stranger, no sooner than strangers of that address may hear so, and for one who asks too
        often, or has too many connections.
        """
        exchange.address = self._live.proxies.client_of(exchange.head.headers, guest.host)
        account = guest.address if exchange.address == guest.host else account_of(exchange.address)
        try:
            exchange.route = parse_target(exchange.head.target)
            if exchange.route == PageRoute("/healthz"):
                await self._turns.take(HEALTH)
                return
            self._sites.check(exchange.head.headers)
            exchange.caller = self._live.gate.caller(exchange.head.headers, common_name)
        except RequestRefused:
            if not guest.is_known:
                wait_s = self._stranger_rates.wait_s(account, exchange.arrived_s, self._live.limits.head_s_max)
                await asyncio.sleep(wait_s)
            await self._turns.take(STRANGERS)
            raise
        exchange.owner, exchange.is_let_in = exchange.caller.owner or account, True
        try:
            self._doors.settle(guest, exchange.caller.owner or guest.address)
        except RequestRefused:
            exchange.is_kept_alive = False
            raise
        await self._turns.take(exchange.owner)
        self._rates.take(exchange.owner, exchange.arrived_s)

    async def go_on(self, exchange: Exchange) -> None:
        """Wait for the turn of the next part of a request that is as much work as several."""
        await self._turns.take(exchange.owner)

    def charge(self, exchange: Exchange, count: int) -> None:
        """Count so many requests more: their owner waits for its next one until its rate has paid for them."""
        self._rates.owe(exchange.owner, exchange.stream.now_s(), count)
