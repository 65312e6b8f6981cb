"""Objects on a pool of servers, each placed by its key."""

from kvtide.tier.pool.membership import Member, membership_of
from kvtide.tier.pool.placement import PoolServer
from kvtide.tier.pool.tier import pool_tier, server_urls

__all__ = ["Member", "PoolServer", "membership_of", "pool_tier", "server_urls"]
