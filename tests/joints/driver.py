"""A machine that uses caches in every order that it can think of, and holds each step to the plain model.

    python -m tests.joints.driver --seconds 60                    everything, seed by the clock
    python -m tests.joints.driver --seed 3 --world 17             one world again
    python -m tests.joints.driver --only go_on --codecs lossless  some operations, models or codecs only

A world is some models, a store and some dozen steps; its seed and number decide all of its choices (threads still have
a will of their own). Ends with one line of JSON; exit status 1 if an answer was wrong or an operation failed.
"""

import argparse
import faulthandler
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.joints.changes import MODELS
from tests.joints.operations import OPERATIONS, error_of
from tests.joints.truth import WrongAnswer
from tests.joints.world import CODECS, World

STEPS = 25
# A step that takes longer hangs: the process ends with the stacks of all its threads.
STEP_S_MAX = 90.0


def play(world: World, allowed: list[str], counts: Counter[str]) -> None:
    """Do some operations and, at the end, look at all prompts in a new process."""
    try:
        # A kind is drawn first: there are many changes and damages, and most prompts should meet neither.
        kinds = [[name for name in allowed if name.partition(" ")[0] == kind] for kind in ("change", "damage")]
        kinds.append([name for name in allowed if " " not in name])
        weights = [len(kind) and weight for kind, weight in zip(kinds, (15, 10, 75), strict=True)]
        for _ in range(STEPS):
            do(world, world.rng.choice(world.rng.choices(kinds, weights)[0]), counts)
        do(world, "restart", counts)
    finally:
        faulthandler.cancel_dump_traceback_later()
        world.close()


def do(world: World, name: str, counts: Counter[str]) -> None:
    faulthandler.dump_traceback_later(STEP_S_MAX, exit=True)
    world.log.append(f"{name}:")
    counts[name] += 1
    OPERATIONS[name](world)


class Given(NamedTuple):
    operations: list[str]
    models: list[str]
    codecs: list[str]


def run(seed: int, seconds: float, given: Given, worlds: range) -> dict[str, Any]:
    """Play worlds until one goes wrong or the time is over."""
    counts: Counter[str] = Counter()
    wrong = failed = 0
    started_s = time.monotonic()
    for number in worlds:
        if time.monotonic() - started_s > seconds or wrong or failed:
            break
        with tempfile.TemporaryDirectory() as folder:
            world = World(random.Random(f"{seed} {number}"), Path(folder), given.models, given.codecs)
            error = error_of(partial(play, world, given.operations, counts))
            if error is not None:
                wrong, failed = int(isinstance(error, WrongAnswer)), int(not isinstance(error, WrongAnswer))
                told = "".join(traceback.format_exception(error))
                print(f"{told}\nagain with --seed {seed} --world {number}, which did:", file=sys.stderr)
                print("\n".join(world.log), file=sys.stderr)
    took = {"seconds": round(time.monotonic() - started_s, 1), "operations": dict(counts)}
    return {"steps": counts.total(), "wrong_answers": wrong, "failed": failed, "seed": seed, **took}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--world", type=int, help="play this one only")
    for name, known in zip(("--only", "--models", "--codecs"), (list(OPERATIONS), MODELS, CODECS), strict=True):
        parser.add_argument(name, default=",".join(known), help=f"of {', '.join(known)}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Faults are logged, which is right and of no interest here.
    logging.disable(logging.WARNING)
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    worlds = range(sys.maxsize) if given.world is None else range(given.world, given.world + 1)
    chosen = Given(*(names.split(",") for names in (given.only, given.models, given.codecs)))
    found = run(given.seed, given.seconds, chosen, worlds)
    print(json.dumps(found), flush=True)
    return 1 if found["wrong_answers"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
