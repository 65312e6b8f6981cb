"""vLLM: a KV connector, and a tier below vLLM's own offloading.

--kv-transfer-config '{"kv_connector": "KVTideConnector", "kv_role": "kv_both",
                       "kv_connector_extra_config": {"store": "disk:///var/cache/kvtide"}}'
"""

import vllm
from kvtide.engines import untested_vllm
from kvtide.errors import UnsupportedModel

try:
    from kvtide.engines.vllm.connector import KVTideConnector
except ImportError as error:
    # Names move between versions: what to install says more than which name is missing.
    if (command := untested_vllm(vllm.__version__)) is not None:
        raise UnsupportedModel(f"vLLM {vllm.__version__} is not tested: {command}") from error
    raise

__all__ = ["KVTideConnector"]
