"""The profile that a live model takes from its store, and the child process that makes it beside the model."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvtide.codec import AwaitingCodec, Codec
from kvtide.config import TENANT_SALT_VARIABLE, environment_with
from kvtide.engines import calibrate_command, calibrate_words, option_text
from kvtide.engines.transformers.fingerprint import ModelIdentity
from kvtide.store import Cache, profile_name

_log = logging.getLogger(__name__)

CALIBRATE_S_MAX = 3600.0
# Weights of one billion in float32, and as much again for fitting.
CALIBRATE_BYTES_MAX = 8 << 30
# Beside a process that computes on the same cores, as little as the system allows.
CALIBRATE_NICE = 19
END_S_MAX = 5.0
_SAID_BYTES_MAX = 4096


class CalibrationStatus(NamedTuple):
    """A background calibration: its last line, such as `moments 3/10`, and whether it succeeded (None: it runs)."""

    said: str
    has_succeeded: bool | None


class ProfileSeeker:
    """Has a cache look for the profile of a model as it is now: at the start, and once the model has changed.

    calibrate: `background` runs `kvtide calibrate` until `close` where the store has no profile at the start; what it
    reached is kept, and the next one goes on. ValueError where nothing can be calibrated, or by no other process.
    """

    def __init__(
        self, cache: Cache, model: Any, store: str, codec: Codec | AwaitingCodec | None, calibrate: str | None
    ) -> None:
        """codec: None where profiles were given."""
        self._cache = cache
        self._folder = str(model.config._name_or_path)
        # Without a folder nobody else can know whose profile it is.
        self._has_folder = bool(self._folder) and Path(self._folder).is_dir()
        self._store = store
        self._codec = codec
        # The fingerprint of the model that was looked for last.
        self.sought = b""
        self._calibrates = calibrate is not None
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        if calibrate not in (None, "background"):
            raise ValueError(f"calibrate is 'background' or None, got {calibrate!r}")
        if calibrate and not isinstance(codec, AwaitingCodec):
            raise ValueError("calibrate makes what tide and importance need, nothing where `profiles` are given")
        if calibrate and store.startswith("memory://"):
            raise ValueError("calibrate= runs in a process of its own, which has no memory:// of ours: name a store")
        if calibrate and not self._has_folder:
            found = repr(self._folder)
            raise ValueError(f"calibrate= runs in a process of its own: it needs the model's folder, got {found}")

    def seek(self, identity: ModelIdentity) -> None:
        """Look, unless that was done for this model. Raises nothing."""
        codec = self._codec
        if identity.refusal is not None or self.sought == identity.fingerprint:
            return
        self.sought = identity.fingerprint
        if not isinstance(codec, AwaitingCodec):
            return
        own = identity.given_fingerprint or (b"" if self._has_folder else identity.fingerprint)
        salt = identity.tenant_salt
        command = calibrate_command(self._folder, self._store, codec.profile_kind, own, bool(salt))
        self._cache.profiles.seek(profile_name(identity.fingerprint, salt), command)
        if self._calibrates and self._cache.profiles.is_waiting and self._child is None:
            self._start(calibrate_words(self._folder, self._store, codec.profile_kind, own), salt)

    def _start(self, words: list[str], tenant_salt: bytes) -> None:
        """Start a child. Raises nothing: without one blocks stay lossless."""
        bounds = ["--seconds", str(CALIBRATE_S_MAX), "--memory-bytes", str(CALIBRATE_BYTES_MAX)]
        command = [sys.executable, "-m", "kvtide.cli", *words, "--json", *bounds]
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            environment = environment_with(TENANT_SALT_VARIABLE, option_text(tenant_salt))
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._output, env=environment
            )
            os.setpriority(os.PRIO_PROCESS, self._child.pid, CALIBRATE_NICE)
        except OSError as error:
            _log.warning("no calibration in the background: %s", error)

    @property
    def calibration(self) -> CalibrationStatus | None:
        """Return how far the calibration in the background is, None if none was started."""
        if self._child is None or self._output is None:
            return None
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _SAID_BYTES_MAX, max(0, size - _SAID_BYTES_MAX))
        lines = tail.decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        code = self._child.poll()
        return CalibrationStatus(said, None if code is None else code == 0)

    def close(self) -> None:
        """End the calibration in the background if it still runs, and say so if it failed. Idempotent."""
        self.sought, found = b"", self.calibration
        if found is None or self._child is None or self._output is None:
            return
        if found.has_succeeded is None:
            self._child.terminate()
            try:
                self._child.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        elif not found.has_succeeded:
            _log.warning("the calibration in the background failed: %s", found.said)
        self._output.close()
        self._child = self._output = None
