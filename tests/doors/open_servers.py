"""Doors of stores and servers: store URLs, `kvtide serve` and its settings."""

from tests.doors.capability import table

# Names for cells that come again.
CELLS = {
    "@server": "docs/operations.md: A server of our own",
    "@clients": "docs/operations.md: Clients",
    "@leaves": "docs/operations.md: What leaves first",
    "@advice": "docs/operations.md: Advice of clients",
    "@valkey": "docs/operations.md: Valkey and Redis",
    "@pool": "docs/operations.md: A pool of kvtide servers",
    "@regions": "docs/regions.md: Regions and a centre",
    "@buckets": "docs/operations.md: Buckets: S3, Google, Azure",
    "@sealed": "docs/seal.md: Sealed stores",
    "@sending": "docs/operations.md: Sharing a server's link",
    "@quotas": "docs/operations.md: Quotas",
    "@watching": "docs/monitoring.md: Watching a server",
    "@grants": "docs/security.md: Who asks",
    "@process": "server process",
    "@headers": "docs/protocol.md: Request headers",
    "@two-processes": "two server processes",
    "@two-regions": "two regions, a centre",
}

STORES = table(
    """
a server behind an engine | http://host:7421 | README.md: Begin | @process | CACHEGEN
replicas | http://one:7421,two:7421 | @clients | @two-processes | OURS
a silent server's replica answers | http://one:7421,two:7421 | @clients | two servers, one of them silent | OURS
    tests/tier/test_roaming.py::test_silent_server_is_left_for_the_other_one_in_time
go on at another server | http://EAST:7421,WEST:7421 | @regions | two servers, one of them breaks off | CACHEGEN
    tests/tier/test_roaming.py::test_other_region_sends_only_the_rest
a socket of this machine | http+unix:///run/kvtide.sock | @clients | @process | CACHEGEN
several tiers, and what is evicted | disk:///var/cache/kvtide http://host:7421?write=evicted | @clients | server
    CACHEGEN | tests/tier/test_stack.py::test_engine_keeps_locally_and_demotes_to_servers
advice in headers | Kvtide-Session | @headers | @process | OURS
bring a prefix up before it is asked for | POST …/prefetch | @advice | @process | OURS
token of a client | ?token_file=/etc/kvtide/token | @clients | @process | OURS
    tests/cli/test_every_store.py::test_every_command_looks_into_it
TLS and certificates of clients | ?ca_file=…&cert_file=…&key_file=… | @clients | @process | OURS
engines find what other regions have | ?force_latest=1 | @clients | @two-regions | CACHEGEN
uploads in pieces, resumed after a cut | ?upload=pieces | @clients | server | CACHEGEN
    tests/tier/test_pieces.py::test_upload_goes_on_after_cuts_where_it_was
what leaves memory first | memory://?policy=lru | @leaves | @process | CACHEGEN
what leaves the disk first | disk:///var/cache/kvtide?policy=… | @leaves | @process | OURS
the report's pool of freed blocks | ?policy=pool | @leaves | @process | PREFIX
the best of several policies | ?policy=mix | @leaves | memory and disk beside the simulator | OURS
    tests/store/test_cache.py::test_cache_holds_in_memory_what_the_simulator_says_and_finds_the_rest_on_disk
objects of unlike size, by what they take | ?policy=mix | @leaves | memory, two tenants | OURS
    tests/evict/test_order.py::test_tenant_whose_blocks_take_less_room_keeps_more_and_all_hit_more
a hybrid model's states, with the blocks that need them | ?policy=mix | @leaves | an order beside made-up prompts | OURS
    tests/evict/test_states.py::test_state_leaves_just_before_its_block
policies as simulated | ?policy= lru s3fifo mix | @leaves | memory tier beside the simulator | OURS
    tests/evict/test_order.py::test_real_tier_keeps_block_by_block_what_the_simulator_says
Valkey and Redis | valkey://… prefix | @valkey | Valkey | OURS
lifetime in Valkey | ttl_s | @valkey | Valkey | OURS
largest value in Valkey | value_bytes_max | @valkey | Valkey | OURS
a Valkey cluster | valkey://… HOST | @valkey | cluster of six | OURS
    tests/tier/test_valkey.py::test_objects_spread_over_all_primaries
S3 bucket | s3://BUCKET | @buckets | SeaweedFS | CACHEGEN
    tests/tier/test_s3.py::test_long_object_moves_in_parts
Azure container | az:// | @buckets | Azurite | OURS
    tests/tier/test_azure.py::test_long_object_moves_in_parts
a sealed store | ?seal=file:/etc/kvtide/seal.keys | @sealed | @process | OURS
a key for each tenant | TENANT KEY seal=file:/etc/kvtide/seal.keys | @sealed | server process, sealed disk | OURS
keys from elsewhere | seal= env:NAME command:WORDS | @sealed | a keyring | OURS
    tests/tier/test_seal.py::test_keys_come_from_a_file_the_environment_or_a_command
a pool of servers | pool://HOST:PORT,HOST:PORT | @pool | three server processes | CACHEGEN
copies in a pool | pool://… replicas | @pool | @two-processes | CACHEGEN
placement by remainder | kind=mod | @pool | @two-processes | CACHEGEN
a file with the pool's map | pool+file:///PATH weight | @pool | @two-processes | CACHEGEN
a pool by names | pool+dns://NAME:PORT | @pool | made-up answers of a name server | CACHEGEN
    tests/tier/test_pool.py::test_names_addresses_are_servers
a pool that registers itself | pool+etcd://HOST:PORT | @pool | etcd | CACHEGEN
    tests/server/test_pool_reach.py::test_members_come_and_go_and_everybody_sees_one_map
the pool's server on this machine first | host socket_path | @pool | five servers | CACHEGEN
    tests/tier/test_pool.py::test_server_of_this_machine_is_read_through_its_socket
a pool under TLS | scheme=https | @pool | two servers | OURS
    tests/server/test_pool_reach.py::test_pool_of_servers_under_tls_is_used_by_one_url
""",
    CELLS,
)

SERVE = table(
    """
tiers of a server | kvtide serve --tier memory:// --tier disk:///var/lib/kvtide | @server | @process | CACHEGEN
tokens and scopes | [[grants]] scopes token_sha256 | @grants | server | OURS
    tests/server/test_security.py::test_every_route_asks_every_caller
tenants on a server | [[grants]] tenant | @grants | server | OURS
    tests/server/test_security.py::test_another_tenants_object_looks_absent_everywhere
largest object | object_bytes_max | @server | server | OURS
    tests/server/test_gateway.py::test_put_needs_a_length_within_the_bound
memory of a server | memory_bytes_max | @server | server | CACHEGEN
    tests/server/test_quotas.py::test_what_is_evicted_counts_no_longer
requests of a tenant | tenant_requests_s_max | @server | server | OURS
    tests/attacks/test_bodies.py::test_look_ups_of_many_keys_cost_as_many_requests
connections of a tenant | tenant_connections_max | @server | server | OURS
    tests/attacks/test_bodies.py::test_connections_of_one_tenant_or_address_are_bounded
idle connections and slow heads | head_s_max | @server | @process | OURS
buffers of a tenant | tenant_buffer_bytes_max | @server | server | OURS
    tests/attacks/test_bodies.py::test_tenants_never_take_all_buffers
slowest body | rate_bytes_s_min | @server | server | OURS
    tests/attacks/test_bodies.py::test_upload_that_stands_still_ends_however_large_it_is
guesses of tokens | stranger_requests_s_max | @server | server | OURS
    tests/attacks/test_bodies.py::test_strangers_of_one_address_are_answered_no_faster_than_their_rate
threads of a tenant | io_threads | @server | server | OURS
    tests/attacks/test_bodies.py::test_slow_reads_of_one_tenant_leave_threads_to_others
shutdown that balancers can follow | drain_delay_s | @server | @process | OURS
    tests/server/test_health.py::test_shutdown_says_not_ready_while_requests_are_still_taken
quota of bytes and objects | bytes_max objects_max | @quotas | server | OURS
    tests/server/test_quotas.py::test_full_quota_is_a_507_that_names_it_and_others_go_on
lifetime by tenant | ttl_s | @quotas | server | OURS
    tests/server/test_quotas.py::test_objects_expire_and_make_room
byte-fair sending | policy = "vtc" | @sending | server | OURS
    tests/attacks/test_operations_attacks.py::test_small_object_passes_many_large_ones_of_another_address_on_an_open_server
the report's lottery | policy = "lottery" | @sending | server | CACHEGEN
    tests/attacks/test_operations_attacks.py::test_small_object_passes_many_large_ones_of_another_address_on_an_open_server
first come, first served | policy = "fifo" | @sending | the server's scheduler | OURS
    tests/server/test_scheduler.py::test_fifo_sends_whole_bodies_in_order_of_arrival
bodies of a tenant at a time | tenant_sends_max | @sending | @process | OURS
rate of the link | link_bits_s | @sending | the server's scheduler | CACHEGEN
    tests/server/test_scheduler.py::test_link_rate_paces_the_grants
shares by weight | sending.weights | @sending | the server's scheduler | OURS
    tests/server/test_security.py::test_weights_change_under_waiting_bodies
settings without a restart | kill -HUP | @server | @process | OURS
    tests/server/test_security.py::test_tokens_change_on_a_signal_and_connections_and_memory_stay
health on a port of its own | --health HOST:PORT | @server | @process | OURS
    tests/deploy/test_manifests.py::test_pod_of_the_statefulset_becomes_ready_by_its_own_probes
access log | --access-log FILE | @server | @process | OURS
audit log | --audit-log FILE | @server | @process | OURS
clients behind a proxy | trusted_proxies | @server | @process | OURS
metrics | GET /metrics | @watching | server | OURS
    tests/server/test_gateway.py::test_pages_tell_what_happened
ranges, tags and look-ups by curl | GET /v1/{namespace}/{key} | docs/protocol.md: The server's protocol, version 1
    curl | OURS
    tests/server/test_gateway.py::test_curl_says_what_the_page_shows
deadline of a request | Kvtide-Deadline-Ms: N | @headers | server | OURS
    tests/attacks/test_bodies.py::test_deadline_holds_while_a_tier_hangs
read through from the centre | --central | @regions | @two-regions | CACHEGEN
    tests/tier/test_pieces.py::test_regions_send_on_what_came_in_pieces
synchronise with the centre | sync_bytes_s_max | @regions | @two-regions | CACHEGEN
    tests/server/test_regions.py::test_what_was_invalidated_is_not_synchronised
go on synchronising after a restart | --manifest /var/kvtide/manifest | @regions | two servers | CACHEGEN
    tests/server/test_regions.py::test_manifest_goes_on_after_a_restart
force the latest | Kvtide-Force-Latest: 1 | @regions | @two-regions | CACHEGEN
    tests/server/test_regions.py::test_latest_is_not_claimed_while_a_region_is_cut_off
bound on staleness | Kvtide-Max-Staleness: SECONDS | @regions | @two-regions | CACHEGEN
    tests/server/test_regions.py::test_region_without_its_centre_goes_on_and_says_since_when
connections in all | connections_max | @server | server | OURS
    tests/server/test_gateway.py::test_connections_above_the_bound_are_turned_away
buffers in all | buffer_bytes_max | @server | server | OURS
    tests/server/test_gateway.py::test_buffers_that_are_all_in_use_are_a_503
sections put together by the server | POST /v1/{namespace}/{key} | docs/protocol.md: Uploads in pieces | server
    CACHEGEN
objects that come in pieces | uploads_bytes_max | @server | the server's uploads | OURS
    tests/server/test_pieces.py::test_bytes_are_bounded_for_each_owner_and_for_all
readers that take nothing | stall_s_max | @server | server | OURS
    tests/server/test_gateway.py::test_stalled_reader_leaves_its_slot_to_others
order within a tenant | Priority: u=N | @headers | @process | OURS
hit rate as clients say it | Kvtide-Decisions: | @headers | server | OURS
    tests/server/test_gateway.py::test_what_clients_decided_is_counted_and_nonsense_refused
tokens that expire | expires_s | @grants | server | OURS
    tests/server/test_security.py::test_grant_expires_by_the_clock
certificates renewed in place | [tls] | @server | @process | OURS
    tests/server/test_security.py::test_certificate_is_renewed_and_connections_stay
listen for everybody | --open-to-all | @grants | settings | OURS
    tests/server/test_security.py::test_listening_for_others_needs_grants_or_the_flag
regions that ask for tenants | on_behalf_of | docs/security.md: Whose is a namespace | @two-regions | OURS
    tests/server/test_regions.py::test_region_may_not_act_for_a_tenant_that_its_grant_does_not_name
where a pool reaches a server | --advertise HOST:PORT | @pool | settings | OURS
    tests/server/test_pool_reach.py::test_server_of_a_pool_must_be_reached_by_others_and_may_advertise_where
etcd under TLS with a user | pool+etcds:// etcd_ca_file etcd_user_file | @pool | etcd | OURS
    tests/server/test_pool_reach.py::test_etcd_under_tls_lets_its_user_in_and_nobody_else
invalidation reaches engines | kvtide invalidate NAMESPACE | @regions | engine and server | OURS
    tests/tier/test_invalidation.py::test_a_running_engine_loses_what_was_invalidated_and_nothing_else
""",
    CELLS,
)
