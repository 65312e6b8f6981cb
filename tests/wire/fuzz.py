"""Lets Atheris drive a target: `python -m tests.wire.fuzz request CORPUS -max_total_time=60`; `object` is the other."""

import sys

import atheris

# These alone: instrumenting every module that they import takes a minute.
with atheris.instrument_imports(include=["kvtide.wire", "kvtide.block", "kvtide.types"]):
    from tests.wire.fuzz_targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
