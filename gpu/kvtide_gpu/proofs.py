"""`kvtide doctor --gpu`: the proof of vLLM's connector, on pages that are made here."""

from __future__ import annotations

import torch

from kvtide.block import BlockLayout, KVDtype
from kvtide.cli.report import DoctorFinding
from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.engines.paged.device import DeviceLayer, DevicePages, device_name
from kvtide.engines.paged.proof import prove

# A block's of two groups, and others between.
PROOF_PAGES = 64


def device_proofs() -> list[DoctorFinding]:
    """Have the CUDA device prove itself; nothing where torch sees none."""
    return proofs(torch.device("cuda")) if torch.cuda.is_available() else []


def proofs(device: torch.device) -> list[DoctorFinding]:
    """Have a device prove pages that are made here, as vLLM's connector has it prove the engine's."""
    clock, found = SystemClock(), []
    for kind, pool in _made_pages(device).items():
        proof = prove(pool, pool.layers, clock, [LosslessCodec()])
        detail = proof.reason or f"every bit came out and in on {device_name(device)}, {proof.seconds:.2f} s"
        found.append(DoctorFinding(f"proof {kind}", "bad" if proof.reason else "ok", detail))
    return found


def _made_pages(device: torch.device) -> dict[str, DevicePages]:
    """Return pages that lie in memory as vLLM's do: rows of each dtype, alone and in groups, states beside a rest."""
    tokens, heads, content, layers = 16, 8, 256, 8
    made = {}
    for dtype in KVDtype:
        shape = (layers, PROOF_PAGES, tokens, heads, content)
        rows = list(torch.zeros(shape, dtype=getattr(torch, dtype.value), device=device).transpose(2, 3))
        layout = BlockLayout(layers, 8 * tokens, heads, content // 2, dtype)
        made[dtype.value] = DevicePages.of_rows(rows, layout)
        grouped = [DeviceLayer(row, 2, (at % 2,)) for at, row in enumerate(rows)]
        made[f"{dtype.value} in groups"] = DevicePages(grouped, layout, tokens)
    states = torch.zeros((PROOF_PAGES, 1 << 16), dtype=torch.uint8, device=device)[:, : 3 << 14]
    made["states"] = DevicePages([DeviceLayer(states, 1, (0,))], BlockLayout(1, 1, 64, 192, KVDtype.BFLOAT16), 1)
    return made
