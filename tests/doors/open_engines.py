"""Doors of engines: options of `attach` and of connectors."""

from tests.doors.capability import table

# Names for cells that come again.
CELLS = {
    "@hf": "docs/transformers.md: kvtide with Hugging Face transformers",
    "@vllm": "docs/vllm.md: Options (`kv_connector_extra_config`)",
    "@stream": "docs/streaming.md: Streaming a stored prefix",
    "@link": "tiny Llama over a shaped link",
    "@tiny": "tiny Llama, random weights",
    "@real": "SmolLM2-135M",
    "@real-vllm": "vLLM 0.32 on a processor, `make test-vllm`",
    "@toy": "both halves of the connector on a toy engine",
    "@twin": "emulation of a GPU, below the option",
    "@profiles": "docs/transformers.md: Profiles of models",
    "@models": "docs/transformers.md: Which models",
    "@caches": "docs/vllm.md: Which caches",
    "@beside": "docs/vllm.md: Beside others",
    "@came": "docs/vllm.md: What came",
    "@request": "docs/vllm.md: Options of a request",
    "@interface": "its interface, no live engine",
    "@llama": "llama-cpp-python on a processor, `make test-llama`",
    "@quick-llama": "docs/llamacpp.md: Quick start",
    "@in-python": "docs/llamacpp.md: In Python",
    "@small-vllm": "real vLLM on a processor, small random weights",
}

LLAMA = table(
    """
a GGUF model, its prompts kept | kvtide llama MODEL.gguf --store --batch --context | @quick-llama | @llama | OURS
    tests/llama/test_server.py::test_prompt_outlives_a_server_that_was_told_to_end
a chat with a GGUF model, charted | kvtide demo --model | @quick-llama | @llama | OURS
    tests/llama/test_server.py::test_demo_is_a_chat_with_a_gguf_model
restore a prompt of llama-cpp-python | attach(llm, "disk:///var/cache/kvtide") | @in-python | @llama | OURS
    tests/llama/test_exact.py::test_restored_answers_are_those_of_a_fresh_model
tide for GGUF | kvtide calibrate MODEL.gguf --store --codec tide:5e-3 | docs/llamacpp.md: Sizes | @llama | OURS
    tests/llama/test_lossy.py::test_tide_keeps_its_promise_by_llama_cpp_s_own_answers
tide for GGUF windows | kvtide calibrate MODEL.gguf --store --codec tide:5e-3 | docs/llamacpp.md: Sizes | @llama | OURS
    tests/llama/test_windows.py::test_tide_keeps_its_promise_of_each_cache
llama-cpp-python's own cache | llm.set_cache(KVTideCache("disk:///var/cache/kvtide")) | @in-python | @llama | OURS
    tests/llama/test_door.py::test_set_cache_attaches_the_model_that_asks
""",
    CELLS,
)

ATTACH = table(
    """
restore a stored prefix | attach(model, "disk:///var/cache/kvtide") | @hf | @tiny | PREFIX
    tests/engines/test_transformers.py::test_restored_answer_is_that_of_the_plain_model
restore what was answered | cached.flush(10) | @hf | @tiny | OURS
memory alone | attach(model, "memory://") | @hf | @tiny | OURS
one line a request in the log | logging.basicConfig(level=logging.INFO) | @hf | @tiny | OURS
lossless codec | codec="lossless" | @hf | @tiny | OURS
raw codec | codec="raw" | @hf | @tiny | ASCEND
tide codec and its quality | codec="tide:5e-3", profiles=… | @hf | @tiny | OURS
installed profiles of tide-light, tide-deep | codec="tide-light", "tide-deep", profiles=installed_profiles() | @hf
    @real | OURS
a profile that is found in the store | kvtide calibrate MODEL_FOLDER --store URL; attach(model, URL, codec="tide:5e-3")
    @profiles | tiny Llama, Qwen3, Mixtral | OURS
    tests/engines/test_profiles.py::test_calibrating_into_the_store_is_all_that_tide_needs
tide for windows, latents, several shapes and beside states
    kvtide calibrate MODEL_FOLDER --store URL; attach(model, URL, codec="tide:5e-3") | @profiles
    tiny Gemma 2 and 3, Gemma 4, Mistral, DeepSeek-V3, LFM2, Granite 4 | OURS
    tests/engines/test_profiles.py::test_calibrating_into_the_store_is_all_that_groups_need
blocks held to their profile's promise | tide:5e-3 | docs/codec.md: What the profile promises | a made-up profile | OURS
    tests/store/test_profiles.py::test_block_that_breaks_the_promise_is_stored_losslessly_and_the_next_ones_are_checked
CacheGen's codec and its levels | codec="cachegen:2" | @hf | @tiny | CACHEGEN
groups of five tokens, bins by layer number | codec="cachegen-snippet" | @hf | @tiny | CACHEGEN
prefix coder | codec="cachegen:2:prefix" | @hf | @tiny | ASCEND
chunkwise codec | codec="chunkwise:1" | @hf | @tiny | ASCEND
never coarser than asked | codec="cachegen:2" | @hf | @tiny | OURS
lossy apart from exact | codec="cachegen:2" | @hf | @tiny | OURS
load what matters | importance=0.25, profiles=installed_profiles() | @hf | @real | IMPRESS
pack blocks anew by their uses | importance=0.25
    docs/decisions/0013-importance.md: 0013: A rough base of all tokens, exact chunks of the important ones | @tiny
    IMPRESS
    tests/engines/test_importance.py::test_uses_are_learnt_and_blocks_packed_anew_stay_exact
fall back where importance says nothing | importance=0.25 | @hf | @tiny | IMPRESS
    tests/engines/test_importance.py::test_a_refused_selection_gives_the_exact_answer
several sequences in a call | attach | @hf | @tiny | OURS
    tests/engines/test_transformers.py::test_padded_rows_restore_up_to_the_column_that_all_reach
static caches | cache_implementation="static" | @hf | @tiny | OURS
    tests/engines/test_transformers.py::test_static_cache_is_filled_as_it_is_made
three heads choose, and their agreement guards | importance=Impress(0.25) | @hf | @tiny | IMPRESS
    tests/engines/test_importance.py::test_the_papers_way_by_steps
store tokens in the order in which the first prompt needs them | importance=0.25 | @hf | @tiny | OURS
    tests/engines/test_importance.py::test_a_first_prompt_says_in_which_order_its_blocks_are_stored
joined reads of chunks | importance=0.25
    docs/decisions/0013-importance.md: 0013: A rough base of all tokens, exact chunks of the important ones | memory
    IMPRESS
    tests/store/load/test_sparse.py::test_a_block_whose_leading_chunks_matter_comes_by_one_read
tenants by salt | tenant_salt=b"…" | @hf | @tiny | OURS
fingerprint of one's own | fingerprint= | @hf | @tiny | OURS
say that weights changed | cached.weights_changed() | @hf | @tiny | OURS
bound of the disk | limits=Limits(disk_bytes_max=…) | @hf | a cache on a small disk | OURS
    tests/joints/test_disk_joints.py::test_prompt_longer_than_the_disk_keeps_its_beginning
bound of what encoding takes | limits=Limits(encode_scratch_bytes_max=…) | @hf | a cache on a disk | ASCEND
    tests/store/test_cache.py::test_scratch_bound_gives_way_to_lossless_and_then_to_nothing
bound of the memory | limits=Limits(memory_bytes_max=…) | @hf | a cache on a disk | OURS
    tests/store/test_cache.py::test_blocks_evicted_from_memory_are_known_to_be_on_disk
bound of what waits to be stored | limits=Limits(store_queue_bytes_max=…) | @hf | a cache on a disk | ASCEND
    tests/store/test_cache.py::test_queue_bound_drops_the_tail_and_flush_says_when_it_was_too_early
stream a prefix to a deadline | attach(start_within_s=0.5) | @stream | @link | CACHEGEN
load no more than a quality needs | attach(quality="5e-3") | @stream | @link | OURS
a deadline and a quality for each request | generate(kvtide_start_within_s=0.2, kvtide_quality=0.1) | @stream | @link
    OURS
advice of each request | generate(kvtide_hint={"session": "a1", "is_last": True, "retain_s": 600, "priority": 1})
    docs/operations.md: Advice of clients | @tiny | OURS
compute what would come too late | policy="two-ended" | @stream | @link | CACHEGEN
read only the base on a slow link | policy="layered" | @stream | @link | OURS
levels of one context together | codec="cachegen:1-4" | @stream | @link | CACHEGEN
level of each chunk by the bandwidth | policy="cachegen", chunk_tokens=1536 | @stream | @link | CACHEGEN
never slower than computing, in transformers | attach(model, …) | @hf | @link | OURS
anchors first, then deltas | codec="cachegen", policy="anchor-first" | @stream | @link | CACHEGEN
deltas one by one on a slow link | policy="deltas-first-when-slow" | @stream | @link | CACHEGEN
text where computing fits | policy="cachegen" | @stream | @link | CACHEGEN
never rougher in the store than it says | start_within_s=0.5 | @stream | @link | OURS
""",
    CELLS,
)

VLLM = table(
    """
a prefix streamed to a deadline, in vLLM | "start_within_s": 0.5, "quality": 5e-3 | docs/streaming.md: In vLLM
    @real-vllm | CACHEGEN
    tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start
what loads brought, in vLLM's log and metrics | vllm:kvtide_…_total loads hit_tokens decided_tokens tier_hits | @came
    @real-vllm | OURS
    tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start
a line for each request, in vLLM's log | kvtide, request … loaded in … saved | @came | @real-vllm | OURS
    tests/vllm/test_home.py::test_agents_are_served_as_usual_over_restarts_of_the_engine_and_of_its_store
beside another connector of vLLM's | "kv_connector": "MultiConnector" "kv_load_failure_policy": "recompute" | @beside
    @real-vllm | OURS
    tests/vllm/test_engine.py::test_beside_another_connector_prompts_in_chunks_and_weights_that_are_loaded_anew
without vLLM's own prefix cache | --no-enable-prefix-caching | @beside | @real-vllm | OURS
    tests/vllm/test_engine.py::test_without_a_prefix_cache_of_vllm_s_own_each_prompt_is_restored
data parallel ranks that share a store | --data-parallel-size | @beside | vLLM 0.32, by night: `--nightly` | OURS
    tests/vllm/test_home.py::test_what_one_data_parallel_rank_stored_another_restores
found by name, in vLLM | "kv_connector": "KVTideConnector" | docs/vllm.md: Quick start | @real-vllm | OURS
    tests/vllm/test_home.py::test_second_process_restores_by_the_short_name_and_is_seen
agents' hints, in vLLM | agent_hint session retain_s priority is_last | @request | @real-vllm | OURS
    tests/vllm/test_home.py::test_agent_s_hint_reaches_the_tiers_and_bad_ones_fail_nothing
requests that load or store nothing, in vLLM | kvtide_no_load kvtide_no_store | @request | @real-vllm | OURS
    tests/vllm/test_home.py::test_request_says_not_to_load_and_not_to_store
files of profiles in vLLM | "profiles": […] | @vllm | options alone | OURS
    tests/engines/test_settings.py::test_users_profiles_come_before_installed_ones
lossy codecs in vLLM | "codec": "tide:5e-3" | @vllm | @real-vllm | ASCEND
    tests/vllm/test_streams.py::test_refinements_come_until_the_model_should_start
profiles of other models in vLLM | "codec": "tide:5e-3" | @vllm
    tiny Llama in vLLM 0.32 on a processor, `make test-vllm` | OURS
    tests/vllm/test_profiles.py::test_profile_in_the_store_is_all_that_vllm_needs
vLLM restores after a restart | "store": "disk:///var/cache/kvtide" | docs/vllm.md: Quick start | @real-vllm
    OFFLOADING
    tests/vllm/test_engine.py::test_restarted_engine_restores_every_full_page_and_says_the_same
blocks within the step or aside | load async layers auto | @vllm | @real-vllm | OFFLOADING
    tests/vllm/test_engine.py::test_blocks_come_within_the_step_or_aside_and_faults_are_recomputed
what a prompt has behind its last full block | "tail_tokens": 16 | @vllm | @real-vllm | OURS
    tests/vllm/test_engine.py::test_what_a_prompt_has_behind_its_last_full_block_is_restored_in_pieces
codec in vLLM | codec raw lossless | @vllm | @real-vllm | ASCEND
    tests/vllm/test_engine.py::test_blocks_come_within_the_step_or_aside_and_faults_are_recomputed
bound of vLLM's disk | disk_bytes_max | @vllm | @real-vllm | OURS
    tests/vllm/test_engine.py::test_full_disk_under_the_engine_fails_no_request
length of a block | block_tokens | @vllm | options alone | OURS
    tests/engines/test_settings.py::test_blocks_are_whole_pages
tenants in vLLM | tenant_salt cache_salt | @vllm | @toy | OURS
    tests/engines/paged/test_halves.py::test_other_salt_finds_nothing
longest look-up | match_s_max | @vllm | @toy | OURS
    tests/engines/paged/test_halves.py::test_slow_store_makes_the_engine_ask_again_and_then_compute
longest load | load_s_max | @vllm | @toy | OURS
    tests/engines/paged/test_halves.py::test_slow_load_ends_at_its_deadline_and_the_next_is_declined
weights changed in place | reset_prefix_cache(reset_connector=True) | docs/vllm.md: When it loads, and when it does not
    @toy | OURS
    tests/engines/paged/test_halves.py::test_reset_serves_nothing_that_was_stored_before
below vLLM's own offloading | "type": "KVTideTier" | docs/vllm.md: Below vLLM's own offloading | @real-vllm | OFFLOADING
    tests/vllm/test_tiering.py::test_restarted_engine_restores_what_its_own_tiering_gave_to_kvtide
groups of any kind of layer, below vLLM's own offloading | "type": "KVTideTier"
    docs/vllm.md: Below vLLM's own offloading | @real-vllm | OURS
    tests/vllm/test_tiering.py::test_any_groups_of_layers_come_back_as_they_were
a GPU that proves itself at the start | KVTideConnector | docs/gpu.md: A GPU proves itself at the start
    real vLLM on an emulated GPU, small random weights | OURS
    tests/vllm/test_opaque.py::test_each_cache_comes_back_where_the_device_is_an_emulated_one
kernels of our own on a GPU | device_kernels auto on off | @vllm | which pages are chosen, without a GPU | OFFLOADING
    tests/vllm/test_model.py::test_pages_of_a_device_are_of_kernels_where_these_are_proved_and_faster
published codecs on a GPU | "codec": "cachegen:2" device_kernels | @vllm | @twin | ASCEND
    gpu/tests/test_pages.py::test_decoding_and_encoding_are_the_device_s
swapping by streams in an engine | device_kernels device_multiprocessors | docs/gpu.md: What is there | @twin
    OFFLOADING
    gpu/tests/test_swap.py::test_blocks_come_in_behind_the_engine_and_not_behind_decoding
objects in a GPU's memory | device_bytes_max | @vllm | @twin | IMPRESS
    gpu/tests/test_device_tier.py::test_stack_moves_what_is_used_to_the_device_and_lets_the_least_used_go
below SGLang's hierarchical cache | --hicache-storage-backend dynamic | docs/vllm.md: SGLang | @interface | OURS
    tests/engines/sglang/test_storage.py::test_pages_come_back_in_another_process_pool
leave pages alone that come slower than they are computed | prefill_tokens_per_s | docs/vllm.md: SGLang | @interface
    OURS
    tests/engines/sglang/test_storage.py::test_pages_that_come_slower_than_they_are_computed_are_left_alone
sliding windows, latents and states | attach | @models | fifteen families with small random weights | OURS
    tests/engines/test_groups.py::test_a_restart_restores_every_group_and_the_answer_is_the_model_s_own
windows, chunked attention, states and groups of several shapes in vLLM | KVTideConnector | @caches | @small-vllm | OURS
    tests/vllm/test_opaque.py::test_all_groups_come_back_as_far_as_they_reach
latents, fp8 and what AMX packs, in vLLM | KVTideConnector | @caches | @small-vllm | OURS
    tests/vllm/test_opaque.py::test_pages_come_back_as_they_were
a draft model's layers, in vLLM | KVTideConnector | @caches | @small-vllm | OURS
    tests/vllm/test_opaque.py::test_draft_s_layers_come_back_beside_the_model_s
adapters, images and embeddings, in vLLM | LoRA | docs/vllm.md: When it loads, and when it does not
    requests as vLLM has them, no engine | OURS
    tests/vllm/test_model.py::test_adapter_is_known_by_its_weights_and_not_by_its_name
how often states are kept | state_every_tokens | @vllm | tiny LFM2, random weights | OURS
    tests/engines/test_groups.py::test_states_are_kept_as_often_as_one_says
prefill elsewhere, in vLLM | follow_s | @vllm | @real-vllm | OURS
    tests/vllm/test_streams.py::test_engine_follows_another_and_computes_the_rest_where_the_link_is_cut
""",
    CELLS,
)
