"""The codec `tide-1`: static transform, embedded quantisation, alias rANS (docs/codec.md).

A block is cut into ranges of layers; each has a base section and refinements, each of which thirds the step. Whatever
unbroken run of a range's refinements is there decodes to values at that run's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype, check_bits
from kvtide.codec.profile import Profile
from kvtide.codec.tide.coding import Fit, Projected, apart_tokens, decode_range, encode_range, project
from kvtide.codec.tide.grid import step_of
from kvtide.codec.tide.law import losses_by_block
from kvtide.codec.tide.model import QUALITY_MAX, QUALITY_MIN, TideModel, place_groups
from kvtide.codec.tide.promise import Seen, check_decoded_error, check_promise, excess_of, promise_of
from kvtide.codec.tide.section import REFINEMENTS_MAX, Steps, StoredLayers, gains_of, load_values, steps_of
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind

# Of a value's significand, the hidden one too.
_PRECISION_BITS = {KVDtype.FLOAT32: 24, KVDtype.FLOAT16: 11, KVDtype.BFLOAT16: 8}


class TideCodec:
    """Encodes at one quality; decodes every object of its profile, at whatever refinements are there."""

    codec_id = "tide-1"
    is_lossless = False

    def __init__(
        self, profile: Profile | None = None, quality: float = 5e-3, refinements: int = 2, path: str | None = None
    ) -> None:
        """quality: the KL divergence of the next token, in nats, that all refinements together are to have.

        It is met on the average of texts like those of the calibration. Without a profile nothing can be encoded or
        decoded. `path` chooses an instruction set, None the fastest. ValueError for a quality or a number of
        refinements that can't be.
        """
        if not 0 <= refinements <= REFINEMENTS_MAX:
            raise ValueError(f"tide has 0 to {REFINEMENTS_MAX} refinements, got {refinements!r}")
        if not QUALITY_MIN <= quality <= QUALITY_MAX:
            raise ValueError(f"quality is a KL divergence from {QUALITY_MIN} to {QUALITY_MAX}, got {quality!r}")
        # The profile made ready.
        self.model = TideModel(profile) if profile else None
        self._path = _native.tide_paths()[0] if path is None else path
        # The step has this quality, or a better one by less than a unit.
        self.quality = quality
        self.steps = self._steps_for(quality, refinements) if self.model else Steps(0, refinements)
        # Blocks are held to the profile's promise, and each gets the step at which its own loss is what was asked.
        self._is_held = self._is_own = True

    def _steps_for(self, quality: float, refinements: int) -> Steps:
        model = self._profiled()
        has_trellis = model.trellis is not None
        return Steps(model.final_units(quality, has_trellis), refinements, has_trellis)

    def _profiled(self) -> TideModel:
        """CorruptPayload without a profile."""
        if self.model is None:
            raise CorruptPayload("a tide object needs its profile")
        return self.model

    def with_steps(self, steps: Steps) -> Self:
        """Return a codec to measure with, at a stated step; it encodes what the profile does not fit, too."""
        codec = copy(self)
        codec.steps, codec._is_held, codec._is_own = steps, False, False
        codec.quality = self.model.quality_at(steps, 0) if self.model else self.quality
        return codec

    def rounded(self) -> Self:
        """Return a codec of the same quality whose levels lie on no trellis, all at one step: as devices encode."""
        codec, model = copy(self), self._profiled()
        quality = max(model.own_quality(self.quality, math.exp(-model.own_loss.deviation)), QUALITY_MIN)
        codec.steps = Steps(model.final_units(quality, is_trellis=False), self.steps.refinements)
        codec._is_own = False
        return codec

    @property
    def profile(self) -> bytes | None:
        """Return the digest of the profile that payloads need."""
        return self.model.profile.digest if self.model else None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound on the memory that encoding takes: coefficients and lists of a range of layers."""
        values = layout.raw_bytes // layout.dtype.item_bytes
        layers = self.model.section_layers if self.model else layout.layers
        return 4 * values + 24 * values * min(layers, layout.layers) // layout.layers

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return a base and its refinements for each range of layers.

        UnencodableBlock without a profile of this shape, for values that are not finite, for blocks that the profile
        does not fit (`check_promise`), and for blocks that do not get smaller.
        """
        check_bits(bits, meta.layout)
        if self.model is None or not self.model.profile.fits(meta.layout):
            raise UnencodableBlock("tide needs a profile of this model's shape")
        model, sections, apart = self.model, list[Section](), apart_tokens(meta, bits)
        steps, projected = self.steps, self._projected(meta, bits, self.steps, apart)
        if self._is_own:
            steps = model.own_steps(steps, self.quality, _gain(projected))
        if self._is_held:
            # What is coded finer than this is better than promised.
            finer = check_promise(_fit(projected), int(np.count_nonzero(apart == 0)))
            steps = steps._replace(final_units=min(steps.final_units, self.steps.final_units - finer))
        if steps != self.steps:
            projected = self._projected(meta, bits, steps, apart)
        for (start, stop), each in zip(model.ranges, projected, strict=True):
            try:
                coded = encode_range(model, self._path, each)
            except CorruptPayload as error:
                raise UnencodableBlock(f"no step keeps a KL of {self.quality}: {error}") from error
            ids = (SectionId(SectionKind.DATA, refinement, start, stop) for refinement in range(len(coded)))
            sections += map(Section, ids, coded)
        if sum(len(section.data) for section in sections) >= meta.layout.raw_bytes:
            raise UnencodableBlock("the block does not get smaller")
        return sections

    def gain_and_excess(self, meta: BlockMeta, bits: BlockBits) -> tuple[float, float]:
        """Return a block's gain at this step (`OwnLoss`), and its error over the promised one (`TideModel.excess`)."""
        projected = self._projected(meta, bits, self.steps, apart_tokens(meta, bits))
        return _gain(projected), excess_of(_fit(projected))

    def _projected(self, meta: BlockMeta, bits: BlockBits, steps: Steps, apart: NDArray[np.uint8]) -> list[Projected]:
        model = self._profiled()
        turns = model.turns(meta, is_back=True)
        layers = [StoredLayers(bits[start:stop], meta.layout.dtype, start, turns) for start, stop in model.ranges]
        return [project(model, steps, each, apart, self._path) for each in layers]

    def check_decoded(self, meta: BlockMeta, bits: BlockBits, sections: Sequence[Section]) -> None:
        """Decode what was encoded of a block and hold it to the promise. UnencodableBlock if it does not keep it.

        `encode` measures coefficients before they are coded; this is what a reader gets, whoever encoded it.
        """
        out, model, dtype = np.empty_like(bits), self.model, meta.layout.dtype
        try:
            self.decode(meta, sections, out)
        except CorruptPayload as error:
            raise UnencodableBlock(f"what was encoded can't be decoded: {error}") from error
        assert model is not None
        turns, units = model.turns(meta, is_back=True), self.steps.final_units
        excess = model.excess(units)
        is_coded, fit, rounding = apart_tokens(meta, bits) == 0, [], 0.0
        for start, stop in model.ranges:
            exact, found = (load_values(StoredLayers(each[start:stop], dtype, start, turns)) for each in (bits, out))
            for place in place_groups(model, start, units).places:
                layers = slice(place.group.layer_start - start, place.group.layer_stop - start)
                _, by_value = model.mean_and_weight(place.group)
                weight = by_value.reshape(-1, 2, 1, *exact.shape[3:]) / step_of(units, 0)
                lost = (weight * (found[layers] - exact[layers]))[:, :, is_coded]
                fit.append((promise_of(place, units, excess), Seen(float(np.square(lost).sum()), 0.0, lost.shape[2])))
                rounding += float(np.square(weight * exact[layers]).sum()) * 4.0 ** -_PRECISION_BITS[dtype]
        check_decoded_error(fit, rounding)

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block into `out`, each range of layers at the quality of its unbroken run of refinements.

        What lies behind a gap is not read. CorruptPayload if a base is missing.
        """
        check_bits(out, meta.layout)
        model = self._profiled()
        if not model.profile.fits(meta.layout):
            raise CorruptPayload("a tide object needs its profile")
        turns = model.turns(meta, is_back=False)
        for (start, stop), run in _runs(model, sections).items():
            target = StoredLayers(out[start:stop], meta.layout.dtype, start, turns)
            decode_range(model, self._path, meta.layout.tokens, run, target)

    def quality_of(self, sections: Sequence[Section]) -> float:
        """Return the block's own KL at the coarsest step of a range of layers here. CorruptPayload as in `decode`."""
        model, found, gains = self._profiled(), [], []
        for run in _runs(model, sections).values():
            steps = steps_of(run[0])
            found.append((model.quality_at(steps, max(0, steps.refinements + 1 - len(run))), steps))
            gains.append(gains_of(run[0])[-1])
        quality, steps = max(found)
        factor = model.own_loss.factor(steps.final_units, float(np.mean(gains)))
        return model.own_quality(quality, factor, steps.is_trellis)

    def quality_without(self, quality: float, refinements: int) -> float:
        """Return the measured KL at the step so many refinements above that of `quality`."""
        steps = self._steps_for(min(max(quality, QUALITY_MIN), QUALITY_MAX), refinements)
        return self._profiled().quality_at(steps, refinements) if refinements else quality

    def losses_by_block(self, losses: Sequence[float], blocks: int, block_tokens: int) -> NDArray[np.float64]:
        """Return what each block of a hit adds to the KL of an answer, by the profile's law."""
        return losses_by_block(self._profiled().positions, losses, blocks, block_tokens)


def _fit(projected: Sequence[Projected]) -> Fit:
    return [group for each in projected for group in each.fit]


def _gain(projected: Sequence[Projected]) -> float:
    return float(np.mean([each.loudness.gains[-1] for each in projected]))


def _runs(model: TideModel, sections: Sequence[Section]) -> dict[tuple[int, int], list[memoryview]]:
    """Return each range's unbroken run of refinements. CorruptPayload if one has no base."""
    by_id = {section.id: memoryview(section.data) for section in sections}
    are_ours = all(kind is SectionKind.DATA and (start, stop) in model.ranges for kind, _, start, stop in by_id)
    if len(by_id) != len(sections) or not are_ours:
        raise CorruptPayload("tide sections are not of this profile's ranges of layers, or not once each")
    runs: dict[tuple[int, int], list[memoryview]] = {}
    for start, stop in model.ranges:
        run = runs[start, stop] = []
        while (data := by_id.get(SectionId(SectionKind.DATA, len(run), start, stop))) is not None:
            run.append(data)
        if not run:
            raise CorruptPayload(f"the base of layers {start} to {stop} is missing")
    return runs
