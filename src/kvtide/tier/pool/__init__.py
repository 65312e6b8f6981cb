"""Objects on a pool of servers, each placed by its key."""

from kvtide.tier.pool.member import Member
from kvtide.tier.pool.placement import PoolServer
from kvtide.tier.pool.url import membership_of, pool_tier, server_urls

__all__ = ["Member", "PoolServer", "membership_of", "pool_tier", "server_urls"]
