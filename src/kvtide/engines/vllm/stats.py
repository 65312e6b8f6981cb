"""Blocks that loads brought, for vLLM's log (`KV Transfer metrics`) and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counts of `WorkerHalf.take_counts`, and what they count.
COUNTED: Mapping[str, str] = MappingProxyType(
    {
        "loads": "Loads that ended.",
        "loaded_tokens": "Tokens that loads brought.",
        "loaded_bytes": "Stored bytes that were read for them.",
        "load_seconds": "Seconds from the order of a load to its end.",
        "failed_loads": "Loads that did not bring all.",
        "rough_loads": "Streamed loads that ended before all refinements were there.",
        "streamed_kl": "Sum of the KL divergences, in nats, at which rough loads ended.",
    }
)


class LoadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for us
    """Counts of one interval: sums, over workers and steps."""

    def reset(self) -> None:
        """Start over."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's, or the next step's."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log shows."""
        return {name: round(count, 4) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Tell whether no load ended."""
        return not self.data


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `vllm:kvtide_…_total` at vLLM's `/metrics`."""

    def __init__(self, config: Any, types: Any, label_names: list[str], label_values: dict[int, list[object]]) -> None:
        super().__init__(config, types, label_names, label_values)
        self._by_engine = {
            name: {engine: counter.labels(*values) if values else counter for engine, values in label_values.items()}
            for name, what in COUNTED.items()
            for counter in [types[Counter](name=f"vllm:kvtide_{name}", documentation=what, labelnames=label_names)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            self._by_engine[name][engine_idx].inc(count)
