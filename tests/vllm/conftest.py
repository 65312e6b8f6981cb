"""Tests on the real engine, collected where it is: in an environment of its own (`make test-vllm`)."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess, kvtide_transfer

# Five pages and a little: computing it takes two seconds.
PROMPT_TOKENS = 660
ANSWER_TOKENS = 16
PAGE_TOKENS = 128


# Another version's sources, for what runs without its compiled parts; they say of no device that it is there.
if "KVTIDE_VLLM_SOURCES" in os.environ:
    sys.path.insert(0, os.environ["KVTIDE_VLLM_SOURCES"])
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

# Their modules import vLLM.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def model() -> Path:
    from kvtide.engines.transformers import smollm2

    return smollm2.converted_folder()


@pytest.fixture(scope="session")
def tokens(model: Path) -> list[int]:
    """A long text's token ids."""
    from kvtide.engines.transformers import smollm2

    return list(smollm2.load_tokenizer(model)("\n".join(str(topics[name]) for name in sorted(topics))).input_ids)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineNursery]:
    """Engines that are forked after the imports."""
    with EngineNursery(Path(sys.executable), tmp_path_factory.mktemp("engine") / "log") as found:
        yield found


@pytest.fixture(scope="session")
def engine(model: Path, nursery: EngineNursery) -> Callable[..., AbstractContextManager[EngineProcess]]:
    """Start engines, each in a process of its own."""

    def start(transfer: dict[str, Any] | None = None, **options: Any) -> AbstractContextManager[EngineProcess]:
        wide = {"max_num_batched_tokens": 4096, **options}
        return EngineProcess(Path(sys.executable), model, nursery.log, transfer, wide, nursery=nursery)

    return start


@pytest.fixture(scope="session")
def tiny_engine(nursery: EngineNursery) -> Callable[..., EngineProcess]:
    """Start engines of tiny models, which have no tokenizers and are not to clear a gigabyte of pages."""

    def start(model: Path, transfer: dict[str, Any] | None, **options: Any) -> EngineProcess:
        small = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 512}
        wide = {**small, "enable_prefix_caching": True, "max_num_batched_tokens": 4096, **options}
        return EngineProcess(Path(sys.executable), model, nursery.log, transfer, wide, nursery=nursery)

    return start


@pytest.fixture(scope="session")
def answers_of(tiny_engine: Callable[..., EngineProcess]) -> Callable[..., list[list[Any]]]:
    """Start engines of a tiny model one after the other; return what each says to the prompts."""

    def ask(
        model: Path, transfers: Sequence[Any], prompts: Sequence[list[int]], answer_tokens: int, **options: Any
    ) -> list[list[Any]]:
        found: list[list[Any]] = []
        for transfer in transfers:
            with tiny_engine(model, transfer, **options) as process:
                found.append([])
                for prompt in prompts:
                    found[-1].append(process.ask(prompt, answer_tokens))
                    if transfer is not None and transfer["kv_connector"] == "KVTideConnector":
                        assert process.do("settle")["is_done"]
        return found

    return ask


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of 256 MiB."""
    mount = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "kvtide-test", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(scope="session")
def soak_prompts(tokens: list[int]) -> list[list[int]]:
    """Six prompts on two shared beginnings, whose answers fill a page and need another."""
    return [
        tokens[start : start + 300] + tokens[tail : tail + 80] for start in (0, 5000) for tail in (9000, 9200, 9400)
    ]


@pytest.fixture(scope="session")
def plain(engine: Any, tokens: list[int], soak_prompts: list[list[int]]) -> dict[str, Any]:
    """What vLLM says by itself: to the long prompt, warmed up, and to the soak's."""
    with engine() as process:
        process.ask(tokens[-300:], 2)
        long = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        soak = [process.ask(prompt, 8)["ids"] for prompt in soak_prompts]
    return {"long": long, "soak": soak}


@pytest.fixture(scope="session")
def filled_store(engine: Any, tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that an engine has left behind after answering the long prompt."""
    store = tmp_path_factory.mktemp("filled") / "store"
    with engine(kvtide_transfer(str(store), codec="lossless")) as process:
        process.ask(tokens[:PROMPT_TOKENS], 2)
        assert process.do("settle")["is_done"]
    return store


def offloading(**options: Any) -> dict[str, Any]:
    """vLLM's own connector to a processor's memory; options: of its tiers."""
    config = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvtide_lab.vllm.cpu_offload", **options}
    config["cpu_bytes_to_use"] = 256 << 20
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}
