"""Says why a prompt hit only N tokens, by looking at what the store holds, block by block."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvtide.codec import CodecRegistry
from kvtide.errors import CorruptPayload
from kvtide.keys import TokenIds, block_keys, tokens_array
from kvtide.plan import Chunk, Decision, PrefillSpeed, Request, decide
from kvtide.store.load import QUALITY_SLACK
from kvtide.tier import Tier
from kvtide.tier.seal import SEALED_CODEC
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import StoredObject, header_and_table_bytes, parse_header, parse_object

__all__ = ["Explanation", "MatchVerdict", "explain", "read_header", "read_object", "weigh"]


# Most objects have header and table in so many bytes: one read.
_HEAD_BYTES = 4096


class MatchVerdict(Enum):
    """The reason why matching ended."""

    ALL_FULL_BLOCKS = "every full block is stored"
    SHORTER_THAN_BLOCK = "the prompt is shorter than one block"
    NEVER_STORED = "the first missing block was never stored, or so long ago that nobody remembers"
    EVICTED = "the first missing block was evicted"
    CORRUPT = "the first missing block was corrupt and has been removed"
    REMOVED = "the first missing block was removed by hand (kvtide rm)"
    CORRUPT_NOW = "the first missing block's object is corrupt; the next load removes it"
    CODEC_ABSENT = "the first missing block is stored, but its codec or profile is not here"
    COARSE = "the first missing block is stored, but coarser than asked for; it is replaced once it is computed"
    OTHER_NAMESPACE = "the same tokens are stored under another namespace (model, dtype, block size or tenant)"


class Explanation(NamedTuple):
    """The blocks that a look-up of this prompt finds, and why it ends there.

    needs: names a codec or profile that is not here, or the quality that the block has. base_bytes: what each hit block
    takes at its least quality.
    """

    prompt_tokens: int
    full_blocks: int
    hit_blocks: int
    hit_tokens: int
    verdict: MatchVerdict
    first_missing: BlockKey | None
    elsewhere: tuple[Namespace, ...]
    needs: str = ""
    base_bytes: tuple[int, ...] = ()


def explain(
    tier: Tier,
    namespace: Namespace,
    tokens: TokenIds,
    block_tokens: int,
    registry: CodecRegistry | None = None,
    quality: float | None = None,
) -> Explanation:
    """Match a prompt against a store and name the reason where the run of blocks ends. Reads, changes nothing.

    quality: the KL divergence that the engine asks for, None for any. Without a registry every codec and profile counts
    as being here.
    """
    prompt = tokens_array(tokens)
    keys = block_keys(namespace, prompt, block_tokens)
    base_bytes: list[int] = []
    verdict = MatchVerdict.ALL_FULL_BLOCKS if keys else MatchVerdict.SHORTER_THAN_BLOCK
    elsewhere: tuple[Namespace, ...] = ()
    needs = ""
    for key in keys:
        found = _state(tier, ObjectId(namespace, key))
        if isinstance(found, MatchVerdict):
            verdict = found
            break
        if registry is not None and registry.get(found.codec_id, found.profile) is None:
            verdict, needs = MatchVerdict.CODEC_ABSENT, _needs(found)
            break
        if quality is not None and found.quality > quality * (1 + QUALITY_SLACK):
            verdict, needs = (
                MatchVerdict.COARSE,
                f"a quality of {quality:.2g}; {found.codec_id} has {found.quality:.2g}",
            )
            break
        base_bytes.append(_base_bytes(found))
    hits = len(base_bytes)
    first_missing = keys[hits] if hits < len(keys) else None
    if verdict is MatchVerdict.NEVER_STORED:
        elsewhere = _namespaces_with(tier, namespace, prompt, block_tokens, hits)
        verdict = MatchVerdict.OTHER_NAMESPACE if elsewhere else verdict
    hit_tokens = hits * block_tokens
    bases = tuple(base_bytes)
    return Explanation(len(prompt), len(keys), hits, hit_tokens, verdict, first_missing, elsewhere, needs, bases)


def _base_bytes(stored: StoredObject) -> int:
    later = sum(entry.size for entry in stored.entries if entry.id.refinement)
    return stored.object_bytes - later


def weigh(found: Explanation, prefill: PrefillSpeed, bytes_per_s: float) -> Decision | None:
    """Return whether loading what was found beats recomputing it over a link of this rate; None if nothing was found.

    The decision is the one that streaming loads take (`stream.plan.decide`). ValueError for a negative rate.
    """
    if not found.hit_blocks:
        return None
    block_tokens = found.hit_tokens // found.hit_blocks
    starts = range(0, found.hit_tokens, block_tokens)
    chunks = [
        Chunk(start, start + block_tokens, (size,), (0.0,))
        for start, size in zip(starts, found.base_bytes, strict=True)
    ]
    return decide(Request(tuple(chunks), True, prefill, 0.0), bytes_per_s)


def _needs(stored: StoredObject) -> str:
    if stored.codec_id == SEALED_CODEC:
        return "the key that sealed it: add ?seal= to the store's URL"
    profile = f" with profile {stored.profile.hex()[:16]}" if stored.profile else ""
    return f"codec {stored.codec_id}{profile}, of model {stored.meta.model or 'unknown'}"


def _state(tier: Tier, object_id: ObjectId) -> StoredObject | MatchVerdict:
    """Return an object that is good, else why it can't be loaded."""
    try:
        stored = read_object(tier, object_id)
        if stored is not None and stored.meta.id != object_id:
            raise CorruptPayload(f"asked for {object_id}, the bytes are those of {stored.meta.id}")
        if stored is not None:
            return stored
    except CorruptPayload:
        return MatchVerdict.CORRUPT_NOW
    reasons = {"evicted": MatchVerdict.EVICTED, "corrupt": MatchVerdict.CORRUPT, "removed": MatchVerdict.REMOVED}
    return reasons.get(tier.removed_reason(object_id) or "", MatchVerdict.NEVER_STORED)


def read_header(tier: Tier, object_id: ObjectId) -> StoredObject | None:
    """Read and verify header and section table alone. None and CorruptPayload as in `read_object`."""
    buffer = memoryview(bytearray(_HEAD_BYTES))
    size = tier.get_into(object_id, buffer)
    if size == len(buffer) < (needed := header_and_table_bytes(buffer)):
        buffer = memoryview(bytearray(needed))
        size = tier.get_into(object_id, buffer)
    if size is None:
        return None
    stored = parse_header(buffer[:size])
    if stored.meta.id.key != object_id.key:
        raise CorruptPayload(f"asked for {object_id}, the bytes are those of {stored.meta.id}")
    return stored


def read_object(tier: Tier, object_id: ObjectId) -> StoredObject | None:
    """Read an object and verify all of it. None if it is absent; CorruptPayload if it is not what its key says.

    Its namespace may be another: servers store a tenant's objects under a hash of the tenant and the namespace.
    """
    header = read_header(tier, object_id)
    if header is None:
        return None
    # One byte more than it says, so that what is too long shows.
    buffer = bytearray(header.object_bytes + 1)
    size = tier.get_into(object_id, memoryview(buffer))
    if size is None:
        return None
    stored = parse_object(memoryview(buffer)[:size], header.meta.id)
    stored.sections()
    return stored


def _namespaces_with(
    tier: Tier, namespace: Namespace, tokens: TokenIds, block_tokens: int, hits: int
) -> tuple[Namespace, ...]:
    """Return the other namespaces that hold more of this prompt than we found."""
    samples = {info.id.namespace: info.id for info in tier.objects() if info.id.namespace != namespace}
    found = []
    for other, sample in sorted(samples.items()):
        keys = block_keys(other, tokens, _block_tokens_of(tier, sample) or block_tokens)[: hits + 1]
        if keys and all(tier.contains(ObjectId(other, key)) for key in keys):
            found.append(other)
    return tuple(found)


def _block_tokens_of(tier: Tier, sample: ObjectId) -> int | None:
    try:
        stored = read_header(tier, sample)
    except CorruptPayload:
        return None
    return stored.meta.layout.tokens if stored else None
