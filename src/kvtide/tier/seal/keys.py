"""Keys that seal objects, and the label by which an object names its key, which can be read without any.

Keys stand one a line, the newest last: `[TENANT] 64 hex digits`; what follows `#` is skipped.
Invariant: no key is ever shown or logged; what is shown is its id, eight bytes of a hash of it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from kvtide.clock import Clock
from kvtide.config import environment_variable
from kvtide.tier.base import Tier
from kvtide.types import ObjectId
from kvtide.wire import ObjectLabel, head_bytes

_log = logging.getLogger(__name__)

KEY_BYTES = 32
KEY_ID_BYTES = 8
KEYS_BYTES_MAX = 1 << 20
COMMAND_S_MAX = 10.0
# A file is read again after so long, so that keys can be added while engines run; any source when an object names an
# unknown key, and as seldom.
REREAD_S = 30.0
SEALED_CODEC = "sealed-1"
# Header and a table of one section; the pieces follow.
HEAD_BYTES = head_bytes(1)


class SealingKey(NamedTuple):
    """A key and the id by which objects name it."""

    id: bytes
    secret: bytes


class _Keys(NamedTuple):
    by_id: Mapping[bytes, SealingKey]
    # The newest key of each tenant; "" is everybody else.
    newest: Mapping[str, SealingKey]


class Keyring:
    """The keys of `file:PATH`, `env:NAME` or `command:WORDS`, kept if it fails later. ValueError if there are none."""

    def __init__(self, source: str, clock: Clock) -> None:
        kind, _, where = source.partition(":")
        if kind not in _READERS or not where.strip():
            raise ValueError(f"seal= takes file:PATH, env:NAME or command:WORDS, got {kind!r}")
        self._is_file = kind == "file"
        self._read: Callable[[], str] = partial(_READERS[kind], where)
        self._shown = f"seal={kind}:{where if kind != 'command' else shlex.split(where)[0]}"
        self._clock, self._lock, self._renewal = clock, threading.Lock(), threading.Thread()
        self._keys = self._parsed()
        self._read_s = clock.monotonic_s()

    def __str__(self) -> str:
        return self._shown

    def newest(self, tenant: str = "") -> SealingKey | None:
        """Return the key that seals what a tenant stores: its own newest one, or everybody's."""
        newest = (self._fresh() if self._is_file else self._keys).newest
        return newest.get(tenant) or newest.get("")

    def find(self, key_id: bytes) -> SealingKey | None:
        """Return the key of an id, whosever it is."""
        return self._keys.by_id.get(key_id) or self._fresh().by_id.get(key_id)

    def key_ids(self) -> list[str]:
        """Return the ids of all keys in hex, the newest last."""
        return [key_id.hex() for key_id in self._keys.by_id]

    def _fresh(self) -> _Keys:
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s - self._read_s < REREAD_S or self._renewal.is_alive():
                return self._keys
            self._read_s = now_s
            if not self._is_file:
                # Look-ups don't wait for a command, which may take long. Where no thread can be had, another time.
                self._renewal = threading.Thread(target=self._renew, name="kvtide-keys", daemon=True)
                with suppress(RuntimeError):
                    self._renewal.start()
                return self._keys
        self._renew()
        return self._keys

    def _renew(self) -> None:
        try:
            self._keys = self._parsed()
        except ValueError as error:
            _log.warning("the keys that are known stay in use: %s", error)

    def _parsed(self) -> _Keys:
        by_id: dict[bytes, SealingKey] = {}
        newest: dict[str, SealingKey] = {}
        for number, line in enumerate(self._read().splitlines(), 1):
            if not (words := line.partition("#")[0].split()):
                continue
            tenant, digits = words if len(words) == 2 else ("", words[0])
            secret = bytes.fromhex(digits) if re.fullmatch(r"([0-9A-Fa-f]{2})*", digits) else b""
            if len(words) > 2 or len(secret) != KEY_BYTES:
                raise ValueError(f"{self}: line {number} is not [TENANT] and {2 * KEY_BYTES} hex digits")
            key_id = hashlib.sha256(b"kvtide-seal-id" + secret).digest()[:KEY_ID_BYTES]
            by_id[key_id] = newest[tenant] = SealingKey(key_id, secret)
        if not by_id:
            raise ValueError(f"{self} holds no key; make one with: openssl rand -hex {KEY_BYTES}")
        return _Keys(by_id, newest)


def sealing_key_id(tier: Tier, object_id: ObjectId) -> bytes | None:
    """Return the id of the key that sealed what an unwrapped tier has there; None if that is absent or not sealed."""
    head = memoryview(bytearray(HEAD_BYTES + KEY_ID_BYTES))
    if tier.get_into(object_id, head) != len(head) or ObjectLabel.of(head).codec.rstrip(b"\0") != SEALED_CODEC.encode():
        return None
    return bytes(head[HEAD_BYTES:])


def split_seal(url: str) -> tuple[str, str | None]:
    """Return a URL without `seal=`, and where its keys come from, None for a store that is not sealed."""
    base, _, query = url.partition("?")
    options = query.split("&") if query and "://" in url else []
    seals = [unquote(each.removeprefix("seal=")) for each in options if each.startswith("seal=")]
    if len(seals) > 1:
        raise ValueError("a store has one seal=; several keys are lines of its file")
    if not seals:
        return url, None
    others = "&".join(each for each in options if not each.startswith("seal="))
    return f"{base}?{others}" if others else base, seals[0]


def _from_file(where: str) -> str:
    try:
        with Path(where).expanduser().open(encoding="ascii") as file:
            return file.read(KEYS_BYTES_MAX)
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ValueError(f"can't read the keys of seal=file:{where}: {error}") from error


def _from_environment(where: str) -> str:
    if (text := environment_variable(where)) is None:
        raise ValueError(f"seal=env:{where}: no such environment variable")
    return text


def _from_command(where: str) -> str:
    words = shlex.split(where)
    try:
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_S_MAX)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise ValueError(f"seal=command:{words[0]}: {type(error).__name__}") from error
    if ran.returncode:
        raise ValueError(f"seal=command:{words[0]} ended with status {ran.returncode}")
    return ran.stdout[:KEYS_BYTES_MAX]


_READERS = {"file": _from_file, "env": _from_environment, "command": _from_command}
