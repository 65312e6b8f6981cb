"""Doors of engines: options of `attach` and of connectors."""

from __future__ import annotations

from tests.doors.capability import Capability, Source

_HF = "docs/transformers.md: kvtide with Hugging Face transformers"
_VLLM = "docs/vllm.md: Options (`kv_connector_extra_config`)"
_STREAM = "docs/streaming.md: Streaming a stored prefix"
_LINK = "tiny Llama over a shaped link"
_TINY = "tiny Llama, random weights"
_REAL = "SmolLM2-135M"
_REAL_VLLM = "vLLM 0.32 on a processor, `make test-vllm`"
_TOY = "both halves of the connector on a toy engine"
_TWIN = "emulation of a GPU, below the option"

ATTACH = (
    Capability("restore a stored prefix", 'attach(model, "disk:///var/cache/kvtide")', _HF, _TINY, Source.PREFIX),
    Capability("restore what was answered", "cached.flush(10)", _HF, _TINY, Source.OURS),
    Capability("memory alone", 'attach(model, "memory://")', _HF, _TINY, Source.OURS),
    Capability("lossless codec", 'codec="lossless"', _HF, _TINY, Source.OURS),
    Capability("raw codec", 'codec="raw"', _HF, _TINY, Source.ASCEND),
    Capability("tide codec and its quality", 'codec="tide:5e-3", profiles=…', _HF, _TINY, Source.OURS),
    Capability(
        "installed profiles of tide-light, tide-deep",
        'codec="tide-light", "tide-deep", profiles=installed_profiles()',
        _HF,
        _REAL,
        Source.OURS,
    ),
    Capability("CacheGen's codec and its levels", 'codec="cachegen:2"', _HF, _TINY, Source.CACHEGEN),
    Capability("groups of five tokens, bins by layer number", 'codec="cachegen-snippet"', _HF, _TINY, Source.CACHEGEN),
    Capability("prefix coder", 'codec="cachegen:2:prefix"', _HF, _TINY, Source.ASCEND),
    Capability("chunkwise codec", 'codec="chunkwise:1"', _HF, _TINY, Source.ASCEND),
    Capability("never coarser than asked", 'codec="cachegen:2"', _HF, _TINY, Source.OURS),
    Capability("lossy apart from exact", 'codec="cachegen:2"', _HF, _TINY, Source.OURS),
    Capability("load what matters", "importance=0.25, profiles=installed_profiles()", _HF, _REAL, Source.IMPRESS),
    Capability(
        "pack blocks anew by their uses",
        "importance=0.25",
        "docs/decisions/0013-importance.md: 0013: A rough base of all tokens, exact chunks of the important ones",
        _TINY,
        Source.IMPRESS,
        "tests/engines/test_importance.py::test_uses_are_learnt_and_blocks_packed_anew_stay_exact",
    ),
    Capability(
        "fall back where importance says nothing",
        "importance=0.25",
        _HF,
        _TINY,
        Source.IMPRESS,
        "tests/engines/test_importance.py::test_a_refused_selection_gives_the_exact_answer",
    ),
    Capability("tenants by salt", 'tenant_salt=b"…"', _HF, _TINY, Source.OURS),
    Capability("fingerprint of one's own", "fingerprint=", _HF, _TINY, Source.OURS),
    Capability("say that weights changed", "cached.weights_changed()", _HF, _TINY, Source.OURS),
    Capability("bound of the disk", "limits=Limits(disk_bytes_max=…)", _HF, _TINY, Source.OURS),
    Capability("bound of what encoding takes", "limits=Limits(encode_scratch_bytes_max=…)", _HF, _TINY, Source.ASCEND),
    Capability("bound of the memory", "limits=Limits(memory_bytes_max=…)", _HF, _TINY, Source.OURS),
    Capability("bound of what waits to be stored", "limits=Limits(store_queue_bytes_max=…)", _HF, _TINY, Source.ASCEND),
    Capability("stream a prefix to a deadline", "attach(start_within_s=0.5)", _STREAM, _LINK, Source.CACHEGEN),
    Capability("load no more than a quality needs", 'attach(quality="5e-3")', _STREAM, _LINK, Source.OURS),
    Capability(
        "a deadline and a quality for each request",
        "generate(kvtide_start_within_s=0.2, kvtide_quality=0.1)",
        _STREAM,
        _LINK,
        Source.OURS,
    ),
    Capability("compute what would come too late", 'policy="two-ended"', _STREAM, _LINK, Source.CACHEGEN),
    Capability("read only the base on a slow link", 'policy="layered"', _STREAM, _LINK, Source.OURS),
    Capability("levels of one context together", 'codec="cachegen:1-4"', _STREAM, _LINK, Source.CACHEGEN),
    Capability(
        "level of each chunk by the bandwidth",
        'policy="cachegen", chunk_tokens=1536',
        _STREAM,
        _LINK,
        Source.CACHEGEN,
    ),
    Capability("never slower than computing, in transformers", "attach(model, …)", _HF, _LINK, Source.OURS),
    Capability(
        "anchors first, then deltas", 'codec="cachegen", policy="anchor-first"', _STREAM, _LINK, Source.CACHEGEN
    ),
    Capability("deltas one by one on a slow link", 'policy="deltas-first-when-slow"', _STREAM, _LINK, Source.CACHEGEN),
    Capability(
        "refine first what mattered to past prompts", 'policy="importance-first"', _STREAM, _LINK, Source.IMPRESS
    ),
    Capability("text where computing fits", 'policy="cachegen"', _STREAM, _LINK, Source.CACHEGEN),
    Capability("never rougher in the store than it says", "start_within_s=0.5", _STREAM, _LINK, Source.OURS),
)

VLLM = (
    Capability(
        "a prefix streamed to a deadline, in vLLM",
        '"start_within_s": 0.5, "quality": 5e-3',
        "docs/streaming.md: In vLLM",
        _REAL_VLLM,
        Source.CACHEGEN,
        "tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start",
    ),
    Capability(
        "what loads brought, in vLLM's log and metrics",
        "vllm:kvtide_loads_total",
        "docs/vllm.md: What came",
        _REAL_VLLM,
        Source.OURS,
        "tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start",
    ),
    Capability(
        "lossy codecs in vLLM",
        '"codec": "tide:5e-3"',
        _VLLM,
        _REAL_VLLM,
        Source.ASCEND,
        "tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start",
    ),
    Capability(
        "vLLM restores after a restart",
        '"store": "disk:///var/cache/kvtide"',
        "docs/vllm.md: Quick start",
        _REAL_VLLM,
        Source.OFFLOADING,
        "tests/vllm/test_engine.py::test_restarted_engine_restores_every_full_page_and_says_the_same",
    ),
    Capability(
        "blocks within the step or aside",
        "load async layers auto",
        _VLLM,
        _REAL_VLLM,
        Source.OFFLOADING,
        "tests/vllm/test_engine.py::test_blocks_come_within_the_step_or_aside_and_faults_are_recomputed",
    ),
    Capability(
        "codec in vLLM",
        "codec raw lossless",
        _VLLM,
        _REAL_VLLM,
        Source.ASCEND,
        "tests/vllm/test_engine.py::test_blocks_come_within_the_step_or_aside_and_faults_are_recomputed",
    ),
    Capability(
        "bound of vLLM's disk",
        "disk_bytes_max",
        _VLLM,
        _REAL_VLLM,
        Source.OURS,
        "tests/vllm/test_engine.py::test_full_disk_under_the_engine_fails_no_request",
    ),
    Capability(
        "length of a block",
        "block_tokens",
        _VLLM,
        "options alone",
        Source.OURS,
        "tests/engines/test_settings.py::test_blocks_are_whole_pages",
    ),
    Capability(
        "tenants in vLLM",
        "tenant_salt cache_salt",
        _VLLM,
        _TOY,
        Source.OURS,
        "tests/engines/paged/test_halves.py::test_other_salt_finds_nothing",
    ),
    Capability(
        "longest look-up",
        "match_s_max",
        _VLLM,
        _TOY,
        Source.OURS,
        "tests/engines/paged/test_halves.py::test_slow_store_makes_the_engine_ask_again_and_then_compute",
    ),
    Capability(
        "longest load",
        "load_s_max",
        _VLLM,
        _TOY,
        Source.OURS,
        "tests/engines/paged/test_halves.py::test_slow_load_ends_at_its_deadline_and_the_next_is_declined",
    ),
    Capability(
        "weights changed in place",
        "reset_prefix_cache(reset_connector=True)",
        "docs/vllm.md: When it loads, and when it does not",
        _TOY,
        Source.OURS,
        "tests/engines/paged/test_halves.py::test_reset_serves_nothing_that_was_stored_before",
    ),
    Capability(
        "below vLLM's own offloading",
        '"type": "KVTideTier"',
        "docs/vllm.md: Below vLLM's own offloading",
        _REAL_VLLM,
        Source.OFFLOADING,
        "tests/vllm/test_tiering.py::test_restarted_engine_restores_what_its_own_tiering_gave_to_kvtide",
    ),
    Capability(
        "groups of any kind of layer, below vLLM's own offloading",
        '"type": "KVTideTier"',
        "docs/vllm.md: Below vLLM's own offloading",
        _REAL_VLLM,
        Source.OURS,
        "tests/vllm/test_tiering.py::test_any_groups_of_layers_come_back_as_they_were",
    ),
    Capability(
        "kernels of our own on a GPU",
        "device_kernels",
        _VLLM,
        "which pages are chosen, without a GPU",
        Source.OFFLOADING,
        "tests/vllm/test_model.py::test_pages_of_a_device_are_torch_s_unless_kernels_are_asked_for",
    ),
    Capability(
        "published codecs on a GPU",
        '"codec": "cachegen:2", "device_kernels": true',
        _VLLM,
        _TWIN,
        Source.ASCEND,
        "tests/gpu/test_pages.py::test_decoding_and_encoding_are_the_device_s",
    ),
    Capability(
        "swapping by streams in an engine",
        "device_kernels device_multiprocessors",
        "docs/gpu.md: What is there",
        _TWIN,
        Source.OFFLOADING,
        "tests/gpu/test_swap.py::test_blocks_come_in_behind_the_engine_and_not_behind_decoding",
    ),
    Capability(
        "objects in a GPU's memory",
        "device_bytes_max",
        _VLLM,
        _TWIN,
        Source.IMPRESS,
        "tests/gpu/test_device_tier.py::test_stack_moves_what_is_used_to_the_device_and_lets_the_least_used_go",
    ),
    Capability(
        "below SGLang's hierarchical cache",
        "--hicache-storage-backend dynamic",
        "docs/vllm.md: SGLang",
        "its interface, no live engine",
        Source.OURS,
        "tests/engines/sglang/test_storage.py::test_pages_come_back_in_another_process_pool",
    ),
)
