"""Cuts of a context: long chunks for few requests, short ones where loading and computing will meet."""

from __future__ import annotations

from kvtide.plan.prefill import PrefillSpeed

# CacheGen, section 5.3: 1,500 tokens; here in whole blocks.
CHUNK_TOKENS = 1536
# By so much the engine may be slower or faster than measured and still meet the link in short chunks.
_ENGINE_SPREAD = 0.2


def cut(tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Return [start, stop) of chunks of one length, the last one what is left. ValueError unless both are positive."""
    if min(tokens, chunk_tokens) < 1:
        raise ValueError(f"a context and its chunks have at least one token, got {tokens} and {chunk_tokens}")
    return [(start, min(tokens, start + chunk_tokens)) for start in range(0, tokens, chunk_tokens)]


def cut_for_meeting(
    tokens: int, block_tokens: int, prefill: PrefillSpeed, deadline_s: float, chunk_tokens: int = CHUNK_TOKENS
) -> list[tuple[int, int]]:
    """Return chunks, each cut into blocks if the engine, computing from the start, may be there at the deadline.

    What both ends work on at once is done twice: a block of that is little, a chunk of 1,536 tokens costs up to four
    points of misses. ValueError as for `cut`, and for a block that is longer than a chunk.
    """
    if not 0 < block_tokens <= chunk_tokens:
        raise ValueError(f"a block has 1 to {chunk_tokens} tokens, got {block_tokens}")
    early = prefill.reach(0, (1 - _ENGINE_SPREAD) * deadline_s)
    late = prefill.reach(0, (1 + _ENGINE_SPREAD) * deadline_s)
    chunks = []
    for start, stop in cut(tokens, chunk_tokens):
        if stop <= early or start >= late:
            chunks.append((start, stop))
        else:
            chunks += [(start + a, start + b) for a, b in cut(stop - start, block_tokens)]
    return chunks
