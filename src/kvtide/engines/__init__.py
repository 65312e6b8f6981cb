"""Engine connectors. Each imports its engine; none is imported by the package itself."""

from kvtide.engines.profiles import installed_profiles, read_profile

__all__ = ["installed_profiles", "read_profile"]
