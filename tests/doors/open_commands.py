"""Doors of commands: `kvtide` and `kvtide-lab`."""

from tests.doors.capability import table

# Names for cells that come again.
CELLS = {
    "@look": "docs/commands.md: Look into a store",
    "@measure": "docs/commands.md: Measure and calibrate",
    "@regions": "docs/regions.md: Regions and a centre",
    "@grants": "docs/security.md: Who asks",
    "@tiny": "tiny Llama, random weights",
    "@real": "SmolLM2-135M",
    "@process": "server process",
    "@machine": "this machine",
    "@engines": "made-up engines",
    "@a-trace": "a made-up trace",
    "@traces": "made-up traces",
}

COMMANDS = table(
    """
a chat of ten requests, with kvtide and without | make demo | README.md: Begin | @real | OURS
    tests/e2e/test_demo.py::test_chat_of_the_demo_restores_every_full_block_across_a_restart
what a store holds | kvtide stats | @look | every kind of store | OURS
    tests/cli/test_every_store.py::test_every_command_looks_into_it
objects of a store | kvtide ls --verify --sort --limit --namespace | @look | every kind of store | OURS
    tests/cli/test_every_store.py::test_every_command_looks_into_it
remove objects | kvtide rm --yes | @look | every kind of store | OURS
    tests/cli/test_every_store.py::test_rm_removes_from_it
commands on every kind of store | --store disk:// http:// pool:// valkey:// s3:// | @look
    servers, a pool, Valkey, SeaweedFS | OURS
    tests/cli/test_every_store.py::test_every_command_looks_into_it
profiles that a store needs | kvtide profile ls --profile | @look | a made-up profile | OURS
    tests/test_explain.py::test_profile_that_is_not_here_is_named
profiles put, fetched and removed | kvtide profile put get rm | @look | every kind of store | OURS
    tests/cli/test_every_store.py::test_profiles_come_and_go
from where on loading pays | kvtide ping --store URL --prefill-tokens-s | @look | every kind of store | OURS
    tests/cli/test_every_store.py::test_every_command_looks_into_it
how large a model's cache is | kvtide size --model --disk-gb | @look | configs of known models | OURS
    tests/cli/test_sizes.py::test_size_is_what_the_models_cache_takes
what a trace or logs would hit, by room and codec | kvtide size --trace --policy --block-tokens
    docs/sizing.md: From a trace or logs of yours | made-up requests | OURS
    tests/cli/test_sizes.py::test_trace_hits_more_in_a_codec_that_takes_less
why a prompt missed | kvtide explain | @look | a cache on a disk | OURS
    tests/test_explain.py::test_removed_block_is_explained_by_the_journal
what a hit saves | kvtide explain --prefill-tokens-s --link-mbit-s | @look | @tiny | OURS
which group of layers ended a hit | kvtide explain --model | @look | Gemma 3, tiny, random weights | OURS
whether the quality is enough | kvtide explain --quality | @look | @tiny | OURS
what is installed | kvtide doctor | @look | @machine | OURS
advice that can be copied | kvtide doctor | @look | @machine | OURS
    tests/cli/test_doctor_hints.py::test_server_that_is_down_is_started_by_the_hint
judge a GPU | kvtide doctor --gpu gpu.json | docs/gpu.md: You have a GPU: ten minutes | a made-up report | OURS
    gpu/tests/test_report.py::test_goals_that_are_reached_are_ok
make a token | kvtide token | @grants | @process | OURS
invalidate a namespace | kvtide invalidate NAMESPACE --server | @regions | a pool of two servers | CACHEGEN
    tests/cli/test_cli.py::test_invalidation_reaches_every_server_of_a_pool
records and their backup | kvtide record --backup --restore | @regions | two servers | CACHEGEN
    tests/cli/test_cli.py::test_records_are_backed_up_removed_and_restored
a profile of another model | kvtide calibrate MODEL --text FILES -o FILE | @measure | @real | OURS
    tests/e2e/test_demo.py::test_own_profile_judges_own_text
a profile of pieces of many files | kvtide calibrate --snippets 200 | @measure | @machine | OURS
    tests/engines/test_profiles.py::test_snippets_make_a_profile
a calibration bounded in time and memory | kvtide calibrate --seconds --memory-bytes | @measure | @tiny | OURS
    tests/engines/test_profiles.py::test_calibration_stops_in_time_and_goes_on
""",
    CELLS,
)

LAB = table(
    """
codecs by bits and quality | kvtide-lab bench codec-quality | @measure | made-up cases | ASCEND
    tests/lab/bench/test_codec_quality.py::test_each_case_is_judged_once_and_parts_take_the_best_tables
tide's promise on many beginnings | kvtide-lab bench codec-quality --beginnings | @measure | SmolLM2-135M | OURS
    tests/lab/test_judges.py::test_worst_text_is_named_and_a_run_goes_on
loss by position, beside the law in profiles | kvtide-lab bench position | @measure | @tiny | OURS
    tests/lab/test_judges.py::test_bench_goes_on_from_its_file_beside_the_law_of_the_profile
speed of codecs | kvtide-lab bench codec-speed | @measure | @machine | ASCEND
    tests/lab/bench/test_quick_runs.py::test_quick_run_renders_a_row_for_each_path_and_coder
server beside others | kvtide-lab bench server | @measure | @process | OURS
    tests/lab/bench/test_quick_runs.py::test_small_round_measures_every_side
Valkey beside others | kvtide-lab bench valkey | @measure | Valkey | OURS
    tests/lab/bench/test_quick_runs.py::test_every_client_moves_every_value
streaming over shaped links | kvtide-lab bench stream | @measure | @tiny | CACHEGEN
    tests/lab/bench/test_stream_bench.py::test_every_policy_is_judged_by_the_model_on_what_came
who gets how much of a link | kvtide-lab bench fairness | @measure | a link of 1 Gbit/s | CACHEGEN
    tests/lab/bench/test_quick_runs.py::test_every_policy_is_measured_over_a_real_link
a tenant among attackers | kvtide-lab bench siege | @measure | @process | OURS
    tests/lab/bench/test_quick_runs.py::test_attack_is_measured_beside_the_servers_quiet
disk tier beside fio | kvtide-lab bench disk | @measure | @machine | OURS
    tests/lab/bench/test_quick_runs.py::test_round_measures_both_sides_and_leaves_nothing
promotion policies | kvtide-lab bench stack | @measure | a replayed trace | IMPRESS
    tests/lab/bench/test_quick_runs.py::test_every_policy_replays_the_same_look_ups
prefix index | kvtide-lab bench index | @measure | @machine | PREFIX
    tests/lab/bench/test_quick_runs.py::test_every_policy_is_measured_at_both_sizes
selectors and ratios | kvtide-lab bench importance | docs/benchmarks.md: Loading what matters of a prefix
    @real | IMPRESS
    tests/lab/bench/test_importance_bench.py::test_needles_lie_at_their_depths_and_are_asked_for
llama.cpp beside its own ways to keep prompts | kvtide-lab bench llama --model | @measure | @tiny | OURS
    tests/llama/test_bench.py::test_bench_compares_ways_to_keep_prompts
vLLM beside its peers | kvtide-lab bench engine | @measure | @engines | OFFLOADING
    tests/lab/bench/test_engine_bench.py::test_engines_answer_the_same_request_one_after_another_and_another_one_first_each_time
agents beside what a user would pick | kvtide-lab bench agents | @measure | @engines | OURS
    tests/lab/bench/test_agents_bench.py::test_rows_say_how_kvtide_stands_to_every_contender
swaps beside computing | kvtide-lab bench offload | @measure | @machine | OFFLOADING
    tests/lab/bench/test_documents_bench.py::test_swaps_are_measured_for_the_studys_shapes
all ways to offload, side by side | kvtide-lab bench offload | @measure | @engines | OFFLOADING
    tests/lab/bench/test_documents_bench.py::test_second_table_has_medians_of_all_ways
items a second, measured | kvtide-lab bench prompts | @measure | @engines | PREFIX
    tests/lab/bench/test_documents_bench.py::test_frequent_prompts_are_found_and_new_ones_are_not
completion by codec, hit and miss | kvtide-lab bench completion | @measure | @engines | ASCEND
    tests/lab/bench/test_documents_bench.py::test_completion_is_measured_on_hits_and_on_misses_of_every_codec
eviction beside the best possible | kvtide-lab sim trace FILE --policy P --capacity 3% | @measure | @a-trace | OURS
    tests/lab/test_sim.py::test_trace_prints_hit_rates_between_lru_and_bound
policies on several traces | kvtide-lab sim trace FILE FILE made:loop --compare | @measure | @traces | OURS
    tests/lab/test_sim.py::test_several_traces_give_a_line_each
traces as tenants of one cache | kvtide-lab sim trace made:loop+made:drift --compare | @measure | @traces | OURS
    tests/lab/test_sim.py::test_traces_share_a_cache_as_tenants_and_hints_come_with_each
advice of clients, simulated | kvtide-lab sim trace FILE --policy mix --hints ends | @measure | @a-trace | OURS
    tests/lab/sim/test_traces.py::test_true_ends_help_and_lies_cost_little
regions, simulated | kvtide-lab sim regions | @measure | simulator | CACHEGEN
    tests/lab/sim/test_simulators.py::test_centre_helps_more_the_more_regions_share_and_nothing_is_sent_twice
placements, simulated | kvtide-lab sim pool | @measure | simulator | CACHEGEN
    tests/lab/sim/test_simulators.py::test_table_shows_what_is_known_of_each_placement
random prompts | kvtide-lab sim prompts | @measure | simulator | PREFIX
    tests/lab/test_sim.py::test_prompts_prints_both_figures
streaming, simulated | kvtide-lab sim stream --link L | @measure | simulator | CACHEGEN
    tests/lab/test_sim.py::test_rows_have_what_they_promise
sending, simulated | kvtide-lab sim fairness --client KIB:COUNT | @measure | simulator | CACHEGEN
    tests/lab/test_sim.py::test_fairness_prints_a_row_for_each_policy
""",
    CELLS,
)
