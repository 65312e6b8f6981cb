"""Doors of commands: `kvtide` and `kvtide-lab`."""

from __future__ import annotations

from tests.doors.capability import Capability, Source

_LOOK = "docs/commands.md: Look into a store"
_MEASURE = "docs/commands.md: Measure and calibrate"
_REGIONS = "docs/operations.md: Regions and a centre"
_GRANTS = "docs/security.md: Who asks"
_TINY = "tiny Llama, random weights"
_REAL = "SmolLM2-135M"
_PROCESS = "server process"

COMMANDS = (
    Capability(
        "cold and warm, side by side",
        "make demo",
        "README.md: Try it",
        _REAL,
        Source.OURS,
        "tests/e2e/test_demo.py::test_demo_restores_every_full_block_and_answers_the_same",
    ),
    Capability("what a store holds", "kvtide stats", _LOOK, _TINY, Source.OURS),
    Capability("objects of a store", "kvtide ls --verify", _LOOK, _TINY, Source.OURS),
    Capability("remove objects", "kvtide rm", _LOOK, _TINY, Source.OURS),
    Capability("why a prompt missed", "kvtide explain", _LOOK, _TINY, Source.OURS),
    Capability("whether loading pays", "kvtide explain --link-mbit-s --prefill-tokens-s", _LOOK, _TINY, Source.OURS),
    Capability("whether the quality is enough", "kvtide explain --quality", _LOOK, _TINY, Source.OURS),
    Capability("what is installed", "kvtide doctor", _LOOK, "this machine", Source.OURS),
    Capability(
        "judge a GPU",
        "kvtide doctor --gpu gpu.json",
        "docs/gpu.md: You have a GPU: ten minutes",
        "a made-up report",
        Source.OURS,
        "tests/cli/test_doctor_gpu.py::test_goals_that_are_reached_are_ok",
    ),
    Capability("make a token", "kvtide token", _GRANTS, _PROCESS, Source.OURS),
    Capability("invalidate a namespace", "kvtide invalidate NAMESPACE --server", _REGIONS, _PROCESS, Source.CACHEGEN),
    Capability(
        "records and their backup",
        "kvtide record --backup --restore",
        _REGIONS,
        "two server processes",
        Source.CACHEGEN,
    ),
    Capability(
        "a profile of another model",
        "kvtide calibrate MODEL --text FILES -o PROFILE",
        _MEASURE,
        _REAL,
        Source.OURS,
        "tests/e2e/test_codec_commands.py::test_own_profile_judges_own_text",
    ),
)

LAB = (
    Capability(
        "codecs by bits and quality",
        "kvtide-lab bench codec-quality",
        _MEASURE,
        "made-up cases",
        Source.ASCEND,
        "tests/lab/bench/test_codec_quality.py::test_each_case_is_judged_once_and_parts_take_the_best_tables",
    ),
    Capability(
        "loss over a chat",
        "kvtide-lab bench turns",
        _MEASURE,
        _TINY,
        Source.OURS,
        "tests/lab/bench/test_turns_bench.py::test_exact_codec_is_exactly_exact_and_a_coarse_one_is_felt_from_the_second_turn_on",
    ),
    Capability(
        "speed of codecs",
        "kvtide-lab bench codec-speed",
        _MEASURE,
        "this machine",
        Source.ASCEND,
        "tests/lab/bench/test_codec_speed.py::test_quick_run_renders_a_row_for_each_path_and_coder",
    ),
    Capability(
        "server beside others",
        "kvtide-lab bench server",
        _MEASURE,
        _PROCESS,
        Source.OURS,
        "tests/lab/bench/test_server_bench.py::test_small_round_measures_every_side",
    ),
    Capability(
        "Valkey beside others",
        "kvtide-lab bench valkey",
        _MEASURE,
        "Valkey",
        Source.OURS,
        "tests/lab/bench/test_valkey_bench.py::test_every_client_moves_every_value",
    ),
    Capability(
        "streaming over shaped links",
        "kvtide-lab bench stream",
        _MEASURE,
        _TINY,
        Source.CACHEGEN,
        "tests/lab/bench/test_stream_bench.py::test_every_policy_stands_beside_its_prediction",
    ),
    Capability(
        "who gets how much of a link",
        "kvtide-lab bench fairness",
        _MEASURE,
        "a link of 1 Gbit/s",
        Source.CACHEGEN,
        "tests/lab/bench/test_fairness_bench.py::test_every_policy_is_measured_over_a_real_link",
    ),
    Capability(
        "a tenant among attackers",
        "kvtide-lab bench siege",
        _MEASURE,
        _PROCESS,
        Source.OURS,
        "tests/lab/bench/test_siege_bench.py::test_attack_is_measured_beside_the_servers_quiet",
    ),
    Capability(
        "disk tier beside fio",
        "kvtide-lab bench disk",
        _MEASURE,
        "this machine",
        Source.OURS,
        "tests/lab/bench/test_disk_bench.py::test_round_measures_both_sides_and_leaves_nothing",
    ),
    Capability(
        "promotion policies",
        "kvtide-lab bench stack",
        _MEASURE,
        "a replayed trace",
        Source.IMPRESS,
        "tests/lab/bench/test_stack_bench.py::test_every_policy_replays_the_same_look_ups",
    ),
    Capability(
        "prefix index",
        "kvtide-lab bench index",
        _MEASURE,
        "this machine",
        Source.PREFIX,
        "tests/lab/bench/test_index.py::test_every_policy_is_measured_at_both_sizes",
    ),
    Capability(
        "selectors, guards and ratios",
        "kvtide-lab bench importance",
        "docs/benchmarks.md: Loading what matters of a prefix",
        _REAL,
        Source.IMPRESS,
        "tests/lab/bench/test_importance_bench.py::test_guards_are_tried_on_every_kind_and_length_and_fallbacks_are_exact",
    ),
    Capability(
        "vLLM beside its peers",
        "kvtide-lab bench engine",
        _MEASURE,
        "made-up engines",
        Source.OFFLOADING,
        "tests/lab/bench/test_engine_bench.py::test_engines_answer_the_same_request_one_after_another_and_another_one_first_each_time",
    ),
    Capability(
        "swapping of pages",
        "kvtide-lab bench offload",
        _MEASURE,
        "this machine",
        Source.OFFLOADING,
        "tests/lab/bench/test_offload_bench.py::test_swaps_are_measured_for_the_studys_shapes",
    ),
    Capability(
        "eviction beside the best possible",
        "kvtide-lab sim trace FILE --policy P --capacity 3%",
        _MEASURE,
        "a made-up trace",
        Source.OURS,
        "tests/lab/test_sim.py::test_trace_prints_hit_rates_between_lru_and_bound",
    ),
    Capability(
        "regions, simulated",
        "kvtide-lab sim regions",
        _MEASURE,
        "simulator",
        Source.CACHEGEN,
        "tests/lab/sim/test_regions.py::test_centre_helps_more_the_more_regions_share_and_nothing_is_sent_twice",
    ),
    Capability(
        "placements, simulated",
        "kvtide-lab sim pool",
        _MEASURE,
        "simulator",
        Source.CACHEGEN,
        "tests/lab/sim/test_pool.py::test_table_shows_what_is_known_of_each_placement",
    ),
    Capability(
        "random prompts",
        "kvtide-lab sim prompts",
        _MEASURE,
        "simulator",
        Source.PREFIX,
        "tests/lab/test_sim.py::test_prompts_prints_both_figures",
    ),
    Capability(
        "streaming, simulated",
        "kvtide-lab sim stream --link L",
        _MEASURE,
        "simulator",
        Source.CACHEGEN,
        "tests/lab/test_sim_stream.py::test_rows_have_what_they_promise",
    ),
    Capability(
        "sending, simulated",
        "kvtide-lab sim fairness --client KIB:COUNT",
        _MEASURE,
        "simulator",
        Source.CACHEGEN,
        "tests/lab/test_sim.py::test_fairness_prints_a_row_for_each_policy",
    ),
)
