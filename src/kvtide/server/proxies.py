"""Who is behind a proxy: what the proxy says of that, believed from configured addresses alone.

Invariant: an address that somebody else's header names never counts; what a trusted proxy was told by others counts up
to the first address that is not trusted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

_UNIX = "unix"
FORWARDED_HEADER = "x-forwarded-for"
_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
# What the protocol lets a line have, and what we take of a binary header's addresses and extensions.
_LINE_BYTES_MAX = 107
_BODY_BYTES_MAX = 1024
_LOCAL, _PROXY = 0x20, 0x21
_IPV4, _IPV6 = 0x1, 0x2


class ProxyHeader(StrEnum):
    """How trusted proxies say whom they speak for: before a connection's first byte, or with each request."""

    PROXY_PROTOCOL = "proxy-protocol"
    X_FORWARDED_FOR = "x-forwarded-for"


class Proxies:
    """The addresses that are believed, and what. ValueError for one that is no address, network or `unix`."""

    def __init__(self, trusted: Sequence[str], header: ProxyHeader | None) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(each) for each in trusted if each != _UNIX]
        self._is_unix_trusted = _UNIX in trusted
        self.header = header
        if bool(trusted) != (header is not None):
            raise ValueError("trusted_proxies and proxy_header belong together")

    def speaks_for_others(self, host: str, header: ProxyHeader) -> bool:
        """Tell whether a connection's peer is believed when it says by this header whom it speaks for."""
        return self.header is header and self._is_trusted(host)

    def _is_trusted(self, host: str) -> bool:
        if host == _UNIX:
            return self._is_unix_trusted
        address = ip_address(host)
        return any(address in network for network in self._networks)

    def client_of(self, headers: Mapping[str, str], host: str) -> str:
        """Return who sent a request: the last one of its chain that is not trusted, else the peer itself."""
        if not self.speaks_for_others(host, ProxyHeader.X_FORWARDED_FOR):
            return host
        for text in reversed(headers.get(FORWARDED_HEADER, "").split(",")):
            try:
                address = ip_address(text.strip())
            except ValueError:
                # What stands before this may be anybody's.
                return host
            host = _plain(address)
            if not self._is_trusted(host):
                return host
        return host


def _plain(address: IPv4Address | IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address).partition("%")[0]


async def read_proxy_header(sock: socket.socket, host: str) -> str:
    """Return who is behind a proxy, by the header that it sends first, of version 1 or 2; `host` if it says nobody.

    Not a byte more is read. ValueError for anything else, ConnectionError if the proxy goes away.
    """
    loop = asyncio.get_running_loop()

    async def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            came = await loop.sock_recv(sock, count - len(data))
            if not came:
                raise ConnectionResetError("the proxy closed within its header")
            data += came
        return data

    start = await read(len(_SIGNATURE))
    if start == _SIGNATURE:
        command, family, *length = await read(4)
        size = int.from_bytes(bytes(length), "big")
        if size > _BODY_BYTES_MAX or command not in {_LOCAL, _PROXY}:
            raise ValueError(f"a proxy's header of command {command:#x} and {size} bytes")
        return _of_binary(command, family >> 4, await read(size), host)
    while not start.endswith(b"\r\n"):
        if len(start) >= _LINE_BYTES_MAX:
            raise ValueError("a proxy's line that does not end")
        start += await read(1)
    return _of_line(start, host)


def _of_binary(command: int, family: int, body: bytes, host: str) -> str:
    if command == _LOCAL or family not in {_IPV4, _IPV6}:
        # The proxy's own check, or an address of a kind that we don't count by.
        return host
    size = 4 if family == _IPV4 else 16
    if len(body) < 2 * size + 4:
        raise ValueError(f"a proxy's header with {len(body)} bytes of addresses")
    return _plain(IPv4Address(body[:4]) if family == _IPV4 else IPv6Address(body[:16]))


def _of_line(line: bytes, host: str) -> str:
    words = line.decode("ascii", errors="replace").removesuffix("\r\n").split(" ")
    if words[:2] == ["PROXY", "UNKNOWN"]:
        return host
    if len(words) != 6 or words[0] != "PROXY" or words[1] not in {"TCP4", "TCP6"}:
        raise ValueError(f"expected a proxy's header, got {line[:40]!r}")
    return _plain(ip_address(words[2]))
