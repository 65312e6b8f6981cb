"""Profiles that ship with the package, and profile files of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from kvtide.codec import Profile
from kvtide.codec.profile import PROFILE_BYTES_MAX
from kvtide.errors import CorruptPayload

__all__ = ["read_profile", "shipped_profiles"]


def shipped_profiles() -> Sequence[Profile]:
    """Return all profiles of the package."""
    files = sorted(resources.files("kvtide.profiles").iterdir(), key=lambda file: file.name)
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
