"""Some models, one store, prompts that share what prompts share, and the caches that are open."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.codec.tide_profiles import fitted
from tests.joints import truth
from tests.joints.changes import make_models

from kvtide.codec import CodecRegistry
from kvtide.config import Limits
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.groups import model_layout

BLOCK_TOKENS = 8
PROMPT_TOKENS_MAX = 220
WORDS = 96
CODECS = ("lossless", "raw", "cachegen:1", "cachegen:4", "chunkwise:1", "chunkwise:3", "tide:5e-3", "tide:5e-1")
EXACT = CODECS[:2]
ANSWER: dict[str, Any] = {
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "max_new_tokens": 6,
}
FLUSH_S_MAX = 120.0


class Seat(NamedTuple):
    """A model with a codec on the world's store, or on a memory of its own."""

    model: str
    codec: str
    is_on_disk: bool = True

    @property
    def is_exact(self) -> bool:
        return self.codec in EXACT


class World:
    """What operations work on. `log` says what they did."""

    def __init__(self, rng: random.Random, folder: Path, models: Sequence[str], codecs: Sequence[str]) -> None:
        self.rng = rng
        self.store = folder / "store"
        self.models = make_models()
        self.profiles = [fitted(model_layout(self.models["plain"], BLOCK_TOKENS))]
        self.seats: dict[Seat, CachedModel] = {}
        self.prompts: list[torch.Tensor] = []
        self.undo: list[tuple[str, str, ExitStack]] = []
        self.log: list[str] = []
        exact, lossy = ([codec for codec in codecs if (codec in EXACT) is wanted] for wanted in (True, False))
        self.chairs = [Seat(name, rng.choice(exact), rng.random() < 0.9) for name in models if exact]
        # Few meet the same blocks more often than many.
        self.chairs += [Seat(models[0], codec) for codec in rng.sample(lossy, min(3, len(lossy)))]

    def note(self, text: str) -> None:
        self.log[-1] += f" {text};"

    def seat(self, *, is_exact: bool | None = None) -> Seat:
        """One of the world's seats; exact ones are as likely as all others."""
        wanted = self.rng.random() < 0.6 if is_exact is None else is_exact
        return self.rng.choice([seat for seat in self.chairs if seat.is_exact is wanted] or self.chairs)

    def open(self, seat: Seat) -> CachedModel:
        """The cache of a seat, opened if it is not."""
        if seat not in self.seats:
            self.seats[seat] = self.attached(seat)
        return self.seats[seat]

    def attached(self, seat: Seat) -> CachedModel:
        """Another open cache of a seat; the caller closes it."""
        return self.made(seat).__enter__()

    def made(self, seat: Seat) -> CachedModel:
        """Another cache of a seat, not open."""
        self.note(f"attach {seat}")
        url = str(self.store) if seat.is_on_disk else "memory://"
        bounds = {"memory_bytes_max": 4 << 20, "disk_bytes_max": 64 << 20, "store_queue_bytes_max": 16 << 20}
        # A load that waits for a thread that is not there is seen as one that hangs.
        limits = Limits(**bounds, load_s_max=300.0)
        profiles, model = self.profiles, self.models[seat.model]
        return attach(model, url, codec=seat.codec, profiles=profiles, block_tokens=BLOCK_TOKENS, limits=limits)

    def close(self) -> None:
        while self.seats:
            self.seats.popitem()[1].__exit__(None, None, None)

    def prompt(self) -> torch.Tensor:
        """A prompt: new, one from before, longer, or with a block that is another. (1, tokens)."""
        kind = self.rng.choice(["new", "same", "same", "longer", "shorter", "edited"]) if self.prompts else "new"
        if kind == "new":
            found = self.words(self.rng.randrange(2, PROMPT_TOKENS_MAX))
        else:
            found = self.rng.choice(self.prompts).clone()
        if kind == "longer":
            found = torch.cat([found, self.words(self.rng.randrange(1, 40))], 1)[:, :PROMPT_TOKENS_MAX]
        elif kind == "shorter":
            found = found[:, : self.rng.randrange(1, found.shape[1] + 1)]
        elif kind == "edited":
            at = self.rng.randrange(found.shape[1])
            found[0, at] = (found[0, at] + 1) % WORDS
        self.note(f"{kind} prompt of {found.shape[1]}")
        self.prompts.append(found)
        del self.prompts[:-12]
        return found

    def words(self, count: int) -> torch.Tensor:
        """Random tokens, (1, count)."""
        return torch.tensor([[self.rng.randrange(WORDS) for _ in range(count)]])

    def ask(self, seat: Seat, ids: torch.Tensor, cached: CachedModel | None = None, **more: Any) -> Any:
        """Let a cached model answer, and hold the answer to the plain one where the cache is exact."""
        arguments = {**ANSWER, **more}
        output = (cached or self.open(seat)).generate(ids, **arguments)
        if seat.is_exact:
            truth.check_answer(self.models[seat.model], ids, output, arguments)
        return output

    def audit(self, seat: Seat, ids: torch.Tensor, cached: CachedModel | None = None) -> None:
        """Hold what a cached model restores of a prompt to the plain cache, or to what its codec may lose of it."""
        cached = cached or self.open(seat)
        if seat.is_exact:
            truth.check_restored(cached, ids)
        else:
            registry = CodecRegistry(self.profiles)
            made = {codec: registry.make(codec, cached.identity.layout) for codec in CODECS if codec not in EXACT}
            truth.check_quality(cached, ids, made[seat.codec], list(made.values()))

    def audit_all(self) -> None:
        """Audit every prompt on every open cache, stored blocks as well as those that still are to be."""
        for seat in list(self.seats):
            for ids in self.prompts:
                self.audit(seat, ids)
