"""Hosts for servers: network namespaces, each joined to us by a cable that can be cut one way or both."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

__all__ = ["Host", "network_hosts"]


class Host:
    """One namespace. Its address is reached from this process alone."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        self.name = f"kvt{os.getpid()}-{number}"
        self.address = f"10.231.{number}.2"
        self.number = number
        self.link = link = f"kv{os.getpid() % 100_000}x{number}"
        _run("ip", "netns", "add", self.name)
        stack.callback(subprocess.run, ["ip", "netns", "delete", self.name], check=False, capture_output=True)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        stack.callback(subprocess.run, ["ip", "link", "delete", link], check=False, capture_output=True)
        _run("ip", "address", "add", f"10.231.{number}.1/30", "dev", link)
        _run("ip", "link", "set", link, "up")
        for words in (["address", "add", f"{self.address}/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _run(*self.command("ip", *words))

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    @property
    def gateway(self) -> str:
        """Our end of the cable: where this host reaches a server of ours that listens on every address."""
        return f"10.231.{self.number}.1"

    def shape(self, mbit_s: int) -> None:
        """Give the cable a rate, both ways."""
        words = ("root", "tbf", "rate", f"{mbit_s}mbit", "burst", "128kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self.link, *words)
        _run(*self.command("tc", "qdisc", "replace", "dev", "eth0", *words))

    def cut(self, *hooks: str) -> None:
        """Drop what comes in (`input`), goes out (`output`), or both."""
        _run(*self.command("nft", "add", "table", "inet", "cut"))
        for hook in hooks:
            chain = f"{{ type filter hook {hook} priority 0; policy drop; }}"
            _run(*self.command("nft", "add", "chain", "inet", "cut", hook, chain))

    def heal(self) -> None:
        """Undo every cut."""
        subprocess.run(self.command("nft", "delete", "table", "inet", "cut"), check=False, capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _remove_left_behind() -> None:
    """Remove namespaces of processes that were killed: their cables have the addresses that ours shall have."""
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, pid in re.findall(r"^(kvt(\d+)-\d+)", said, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def network_hosts(count: int) -> Iterator[Sequence[Host]]:
    """Make hosts, and remove them. Skips the test, with the reason, where that is not allowed."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nft")):
        pytest.skip("network namespaces need root, ip and nft: apt install iproute2 nftables")
    _remove_left_behind()
    with ExitStack() as stack:
        try:
            hosts = [Host(number, stack) for number in range(count)]
            hosts[0].cut("input")
            hosts[0].heal()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode(errors='replace').strip()}")
        yield hosts
