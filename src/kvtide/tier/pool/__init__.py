"""Objects on a pool of servers, each placed by its key."""

from kvtide.tier.pool.membership import EtcdMembership, Membership, Watcher
from kvtide.tier.pool.placement import Placement, PoolMap, PoolServer
from kvtide.tier.pool.url import membership_of, pool_tier, server_urls

__all__ = [
    "EtcdMembership",
    "Membership",
    "Placement",
    "PoolMap",
    "PoolServer",
    "Watcher",
    "membership_of",
    "pool_tier",
    "server_urls",
]
