"""kvtide's connector on a processor as on a GPU: its pages are copied by torch, once they are proved.

Use it as `kv_connector: EmulatedGpuConnector, kv_connector_module_path: kvtide_lab.vllm.emulated_gpu`, on a store
of its own: a processor's pages have another order inside than a GPU's, and here its blocks bear a GPU's names.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from kvtide.engines.vllm import connector, pages

__all__ = ["EmulatedGpuConnector"]


class EmulatedGpuConnector(connector.KVTideConnector):
    """Takes the processor's pages for those of a GPU: whatever their order, they come back as they were."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        taken = copy.copy(vllm_config)
        taken.device_config = SimpleNamespace(device_type="cuda")
        pages.KNOWN_BACKENDS.update({"CPU_ATTN", "CPU_MLA", "AMX_MLA"})
        super().__init__(taken, role, kv_cache_config)
