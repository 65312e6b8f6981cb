"""Says why a prompt hit only N tokens, by looking at what the store holds, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvtide.codec import CodecRegistry
from kvtide.errors import CorruptPayload
from kvtide.group import LayerGroup, hit_of, part_keys
from kvtide.keys import TokenIds, block_keys, tokens_array
from kvtide.plan import Decision, PrefillSpeed, decide
from kvtide.plan.base import Chunk, Request
from kvtide.store.load import QUALITY_SLACK
from kvtide.tier import Tier
from kvtide.tier.seal import SEALED_CODEC
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import StoredObject, header_and_table_bytes, parse_header, parse_object

__all__ = ["Explanation", "MatchVerdict", "explain", "explain_groups", "read_header", "read_object", "weigh"]


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
    takes at its least quality. ended_by: the group of layers whose part is missing, where there are several.
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
    ended_by: str = ""


class _Look(NamedTuple):
    """An object that is good, or why it can't be loaded and what it needs."""

    stored: StoredObject | None
    verdict: MatchVerdict = MatchVerdict.ALL_FULL_BLOCKS
    needs: str = ""


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
    look = _Look(None, MatchVerdict.ALL_FULL_BLOCKS if keys else MatchVerdict.SHORTER_THAN_BLOCK)
    for key in keys:
        look = _look(tier, ObjectId(namespace, key), registry, quality)
        if look.stored is None:
            break
        base_bytes.append(_base_bytes(look.stored))
    hits, verdict = len(base_bytes), look.verdict
    first_missing = keys[hits] if hits < len(keys) else None
    elsewhere: tuple[Namespace, ...] = ()
    if verdict is MatchVerdict.NEVER_STORED:
        elsewhere = _namespaces_with(tier, namespace, prompt, block_tokens, hits)
        verdict = MatchVerdict.OTHER_NAMESPACE if elsewhere else verdict
    hit_tokens = hits * block_tokens
    bases = tuple(base_bytes)
    return Explanation(len(prompt), len(keys), hits, hit_tokens, verdict, first_missing, elsewhere, look.needs, bases)


def explain_groups(
    tier: Tier,
    groups: Sequence[tuple[LayerGroup, Namespace]],
    tokens: TokenIds,
    block_tokens: int,
    registry: CodecRegistry | None = None,
    quality: float | None = None,
) -> Explanation:
    """Do as `explain` for a model of several groups, each with its namespace: the first one names the blocks.

    `ended_by` is the group whose part is missing, `first_missing` that part's key. Reads every part that is here.
    """
    prompt = tokens_array(tokens)
    keys = block_keys(groups[0][1], prompt, block_tokens)
    ids = [[ObjectId(space, key) for key in part_keys(space, keys)] for _, space in groups]
    looks = [[_look(tier, one, registry, quality) for one in mine] for mine in ids]
    present = [[look.stored is not None for look in mine] for mine in looks]
    blocks, ended_by, _ = hit_of(present, [group.reach_blocks(block_tokens) for group, _ in groups])
    found = Explanation(len(prompt), len(keys), blocks, blocks * block_tokens, MatchVerdict.ALL_FULL_BLOCKS, None, ())
    if not keys or ended_by is None:
        return found._replace(verdict=found.verdict if keys else MatchVerdict.SHORTER_THAN_BLOCK)
    # A hit of one block more needs it.
    missing = max(position for position in range(blocks + 1) if not present[ended_by][position])
    look, name = looks[ended_by][missing], groups[ended_by][0].name
    key = ids[ended_by][missing].key
    return found._replace(verdict=look.verdict, needs=look.needs, first_missing=key, ended_by=name)


def _look(tier: Tier, object_id: ObjectId, registry: CodecRegistry | None, quality: float | None) -> _Look:
    found = _state(tier, object_id)
    if isinstance(found, MatchVerdict):
        return _Look(None, found)
    if registry is not None and registry.get(found.codec_id, found.profile) is None:
        return _Look(None, MatchVerdict.CODEC_ABSENT, _needs(found))
    if quality is not None and found.quality > quality * (1 + QUALITY_SLACK):
        needs = f"a quality of {quality:.2g}; {found.codec_id} has {found.quality:.2g}"
        return _Look(None, MatchVerdict.COARSE, needs)
    return _Look(found)


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
