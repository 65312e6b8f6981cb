"""Engine connectors. Each imports its engine; none is imported by the package itself."""

from kvtide.engines.profiles import installed_profiles, read_profile

# The connector's interface is experimental and changes between versions; these were tested.
VLLM_VERSIONS = ("0.32.",)

__all__ = ["VLLM_VERSIONS", "installed_profiles", "read_profile"]
