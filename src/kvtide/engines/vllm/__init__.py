"""vLLM: a KV connector, and a tier below vLLM's own offloading.

--kv-transfer-config '{"kv_connector": "KVTideConnector", "kv_connector_module_path": "kvtide.engines.vllm",
                       "kv_role": "kv_both", "kv_connector_extra_config": {"store": "disk:///var/cache/kvtide"}}'
"""

from kvtide.engines.vllm.connector import KVTideConnector

__all__ = ["KVTideConnector"]
