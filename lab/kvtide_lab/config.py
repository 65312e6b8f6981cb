"""The environment of what is measured: the only place in the lab that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def leave_a_core() -> None:
    """Have the engine compute on all cores but one, unless the user said otherwise: what is measured runs there too.

    Works only before torch is imported. One core stays where there is no other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))


def engine_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an engine's process on this machine's processors, alone in its process."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Block names of other connectors hang on it; ours don't.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        **extra,
    }
