"""Who may hold how much: quotas and priorities over any policy. Each account has a policy of its own.

Invariant: an account's `held` is the sum of `held` over its runs, and so is the ledger's over its accounts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.index.policy import EvictionPolicy
from kvtide.index.run import Run
from kvtide.types import Namespace


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds under every policy.

    `quotas`: the most blocks that a namespace may hold; 0 holds none. `ttl_s`: a prefix unused for this long is
    neither matched nor kept. ValueError for a negative quota or a time that is not positive.
    """

    quotas: Mapping[Namespace, int] = field(default_factory=dict)
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        for namespace, quota in self.quotas.items():
            if quota < 0:
                raise ValueError(f"a quota must not be negative, got {quota} for {namespace.hex()[:12]}")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, got {self.ttl_s}")


class Account:
    """The runs that compete with each other: those of one priority, and of one namespace if that one has a quota."""

    __slots__ = ("blocks_max", "ghost_blocks", "ghosts", "held", "policy", "priority")

    def __init__(self, policy: EvictionPolicy, blocks_max: int, priority: int) -> None:
        self.policy = policy
        self.blocks_max = blocks_max
        self.priority = priority
        self.held = 0
        # Runs that have remembered blocks, those that lost one longest ago first.
        self.ghosts: OrderedDict[Run, None] = OrderedDict()
        self.ghost_blocks = 0


class Ledger:
    """Hands out accounts and says whose turn it is to give blocks back."""

    def __init__(self, policy_of: Callable[[int], EvictionPolicy], blocks_max: int, rules: Rules) -> None:
        if blocks_max < 0:
            raise ValueError(f"blocks_max must not be negative, got {blocks_max}")
        self.blocks_max = blocks_max
        self.held = 0
        self._policy_of = policy_of
        self._rules = rules
        self._accounts: dict[tuple[Namespace | None, int], Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account_of(self, namespace: Namespace, priority: int) -> Account:
        """Return the account for new blocks of a namespace, opened if need be."""
        owner = namespace if namespace in self._rules.quotas else None
        account = self._accounts.get((owner, priority))
        if account is None:
            blocks_max = self.blocks_max if owner is None else min(self._rules.quotas[namespace], self.blocks_max)
            account = Account(self._policy_of(blocks_max), blocks_max, priority)
            self._accounts[owner, priority] = account
        return account

    def excess(self, namespace: Namespace) -> tuple[int, list[Account]]:
        """Return by how many blocks a namespace is over its quota, and who has to pay: lowest priority first."""
        if namespace not in self._rules.quotas:
            return 0, []
        own = [account for (owner, _), account in self._accounts.items() if owner == namespace]
        over = sum(account.held for account in own) - self._rules.quotas[namespace]
        return max(0, over), sorted(own, key=lambda account: account.priority)

    def payers(self) -> list[Account]:
        """Return the accounts in the order in which they pay when the whole is over its bound.

        Lowest priority first; among equals the one that fills most of what it may hold.
        """
        if len(self._accounts) == 1:
            return list(self._accounts.values())
        holding = [account for account in self._accounts.values() if account.held]
        return sorted(holding, key=lambda account: (account.priority, -account.held / max(1, account.blocks_max)))

    def check(self, runs: Sequence[Run]) -> None:
        """AssertionError if the counts are not those of all runs of the tree."""
        for account in self:
            own = [run for run in runs if run.account is account]
            assert account.held == sum(run.held for run in own)
            assert account.ghost_blocks == sum(len(run.keys) - run.held for run in own)
            assert account.ghost_blocks <= account.policy.ghost_blocks_max
            assert account.ghosts.keys() == {run for run in own if run.held < len(run.keys)}
        assert self.held == sum(run.held for run in runs)
