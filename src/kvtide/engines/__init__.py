"""Engine connectors, none of which is imported here; profiles of models; what kvtide-gpu brings."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvtide.codec import PROFILE_BYTES_MAX, Profile
from kvtide.engines.plugin import untested_vllm, vllm_distribution
from kvtide.errors import CorruptPayload
from kvtide.tier import shown_url

__all__ = ["device_part", "installed_profiles", "option_bytes", "read_profile", "untested_vllm", "vllm_distribution"]

_log = logging.getLogger(__name__)

DEFAULT_PROFILE_KIND = "tide-layer"
# Before hex digits.
_HEX = "hex:"


def installed_profiles() -> Sequence[Profile]:
    """Return the profiles of packages that entry points `kvtide.profiles` name; what can't be read is warned of."""
    found = list[tuple[str, Profile]]()
    for package in sorted({point.value for point in entry_points(group="kvtide.profiles")}):
        try:
            files = [each for each in resources.files(package).iterdir() if each.name.endswith(".kvprofile")]
            found += [(each.name, Profile.parse(each.read_bytes())) for each in files]
        except Exception as error:  # noqa: BLE001 - importing a package of somebody else's runs its code
            _log.warning("profiles of the package %s are left out: %r", package, error)
    return [profile for _, profile in sorted(found, key=lambda each: each[0])]


def device_part(name: str) -> Any:
    """Load `pages` or `report` of kvtide-gpu's entry points. ImportError, with the command, if it is not installed."""
    points = entry_points(group="kvtide.device", name=name)
    if not points:
        raise ModuleNotFoundError("kvtide-gpu is not installed: pip install 'kvtide[gpu]', or ./gpu in a checkout")
    return next(iter(points)).load()


def read_profile(path: Path) -> Profile:
    """Return the profile in a file. ValueError if it can't be read, is too large or is not one."""
    try:
        if path.stat().st_size > PROFILE_BYTES_MAX:
            raise ValueError(f"{path} is larger than any profile: {path.stat().st_size} bytes")
        return Profile.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"can't read profile {path}: {error}") from error
    except CorruptPayload as error:
        raise ValueError(f"{path}: {error}") from error


def calibrate_command(folder: str, store: str, kind: str, fingerprint: bytes, is_salted: bool) -> str:
    """Return the command, without secrets, that puts a profile into a store for an engine of this fingerprint."""
    words = ["kvtide", "calibrate", folder if folder and Path(folder).exists() else "MODEL_FOLDER"]
    words += ["--store", shown_url(store)]
    words += ["--codec", kind] if kind != DEFAULT_PROFILE_KIND else []
    words += ["--fingerprint", option_text(fingerprint)] if fingerprint else []
    return shlex.join([*words, *(["--tenant-salt", "TENANT_SALT"] if is_salted else [])])


def option_text(data: bytes) -> str:
    """Return a fingerprint or a salt as commands take it: as it is, or in hex digits."""
    text = data.decode("ascii", errors="replace")
    is_text = text.isascii() and text.isprintable() and not text.startswith(_HEX)
    return text if is_text else _HEX + data.hex()


def option_bytes(text: str) -> bytes:
    """Return the bytes that `option_text` wrote. ValueError for bad hex digits."""
    return bytes.fromhex(text.removeprefix(_HEX)) if text.startswith(_HEX) else text.encode()
