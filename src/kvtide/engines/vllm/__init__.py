"""vLLM: a KV connector, and a tier below vLLM's own offloading (docs/vllm.md)."""

from pathlib import Path

import vllm

try:
    from kvtide.engines.vllm.connector import KVTideConnector
except ImportError:
    # Names move between versions: a text of all that this one lacks says more than the first.
    from kvtide.engines.surface import vllm_warning

    vllm_warning(vllm.__version__, Path(vllm.__file__).parent)
    raise

__all__ = ["KVTideConnector"]
