"""Objects on a pool of servers, each placed by its key."""

from kvtide.tier.pool.placement import PoolServer
from kvtide.tier.pool.url import Member, membership_of, pool_tier, server_urls

__all__ = ["Member", "PoolServer", "membership_of", "pool_tier", "server_urls"]
