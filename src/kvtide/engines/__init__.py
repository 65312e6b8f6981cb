"""Engine connectors, and profiles of models: installed ones, and files of the user's.

Each connector imports its engine; none is imported by the package itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

from kvtide.codec import PROFILE_BYTES_MAX, Profile
from kvtide.errors import CorruptPayload

__all__ = ["VLLM_VERSIONS", "installed_profiles", "read_profile"]

# The connector's interface is experimental and changes between versions; these were tested.
VLLM_VERSIONS = ("0.32.",)
_ENTRY_POINTS = "kvtide.profiles"


def installed_profiles() -> Sequence[Profile]:
    """Return the profiles of every distribution that names a package of them as entry point `kvtide.profiles`."""
    packages = sorted({point.value for point in entry_points(group=_ENTRY_POINTS)})
    files = [file for package in packages for file in resources.files(package).iterdir()]
    files.sort(key=lambda file: file.name)
    return [Profile.parse(file.read_bytes()) for file in files if file.name.endswith(".kvprofile")]


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
