"""What has no door yet: no user can switch it on, or no test goes through the option."""

from __future__ import annotations

from tests.doors.capability import Left, Source

LEFT = (
    Left(
        "amount and number of what is sent at a time",
        "slots slice_bytes tenant_slots_max",
        "a test on a server process",
        Source.CACHEGEN,
    ),
    Left("quotas in an engine's memory and disk", "limits by tenant salt", "quotas that local tiers ask", Source.OURS),
    Left("blocks that stay longer", "priority of a namespace", "hints that rankings ask", Source.OURS),
    Left("encode stored blocks anew", "kvtide recompress", "a command that decodes and encodes a store", Source.ASCEND),
    Left("importance in vLLM", '"importance": 0.25', "sparse loads in the connector", Source.IMPRESS),
    Left(
        "importance says what stays in memory",
        "importance=0.25",
        "a test with a memory that is too small",
        Source.IMPRESS,
    ),
    Left("chunks move up, not objects", "importance=0.25", "tiers that hold parts of objects", Source.IMPRESS),
    Left("refinements of single chunks", 'codec="tide-chunked"', "an object format for them", Source.IMPRESS),
    Left(
        "layers within the step on a GPU",
        '"load": "layers"',
        "pages of a device that are filled by layers",
        Source.OFFLOADING,
    ),
    Left("multiprocessors of the kernels", "device_multiprocessors", "a GPU", Source.OFFLOADING),
    Left("blocks that are not full", "block_tokens", "keys of partial blocks", Source.PREFIX),
    Left(
        "fingerprint, queue and threads of vLLM",
        "fingerprint store_queue_bytes_max load_threads",
        "tests in vLLM's environment",
        Source.OURS,
    ),
    Left("Google's store", "gs://", "a bucket there to test on", Source.OURS),
)
