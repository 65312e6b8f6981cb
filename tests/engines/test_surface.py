"""Snapshots of vLLM's releases, and what the connector uses of each: by names and parameters, without vLLM."""

from pathlib import Path

import pytest

from kvtide.engines.plugin import TESTED_VLLM
from kvtide.engines.surface import Sources, SurfaceChanges, snapshots, vllm_warning
from vllm_surface import connector_uses, problems

KNOWN, USES = snapshots(), connector_uses()
TESTED = KNOWN["0.32"]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

SOURCES = {
    "engine/__init__.py": "from .parts import Config as Config\n",
    "engine/parts.py": """
class Base(ABC):
    rank: int = 0

    @abstractmethod
    def run(self, a: int, b: "str" = "x", *, c: int = 1, **more: Any) -> "list[Item]": ...


class Config(Base):
    items: dict[str, list["Item"]] | None = None
    kind: ClassVar[int] = 3

    def __init__(self, name: str, other: type[Item] | None = None):
        self.other = make()
        self.name = name
        if other:
            self.other = other

    @property
    def first(self) -> Optional["Item"]: ...


@dataclass
class Item:
    size: int
    label: str = ""


Alias = Item
""",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        ("engine:Config", "class needs run"),
        ("engine:Config()", "(name, other=)"),
        ("engine.parts:Alias()", "(size, label=)"),
        ("engine:Config.rank", "field int"),
        ("engine:Config.name", "field str"),
        ("engine:Config.other", "field type[Item] | None"),
        ("engine:Config.other.label", "field str"),
        ("engine:Config.items[][].size", "field int"),
        ("engine:Config.first", "property Optional['Item']"),
        ("engine:Config.first.label", "field str"),
        ("engine:Config.run", "(a, b=, *, c=, **more)"),
        ("engine:Config.run()[].size", "field int"),
        ("engine:Config.kind", "field ClassVar[int]"),
        ("engine:Config.kinds", None),
        ("engine:Config.rank.size", None),
        ("engine:Nobody", None),
        ("nobody:Config", None),
        ("nobody:Config?", None),
    ],
)
def test_use_leads_to_what_the_sources_have(sources: Sources, use: str, text: str | None) -> None:
    assert sources.surface([use]) == {use: text}


def test_what_is_gone_or_other_is_told_and_what_may_be_gone_is_not() -> None:
    before = {"a:A": "class", "a:b": "(x)", "a:c": "(x)", "a:d?": "class"}
    found = SurfaceChanges.between(before, {"a:A": None, "a:b": "(x, y)", "a:c": "(x)", "a:e": "class"})
    assert found == SurfaceChanges(("a:A",), ("a:b: (x, y), was (x)",))


@pytest.mark.parametrize("version", KNOWN)
def test_connector_works_with_every_snapshot(version: str) -> None:
    assert problems(USES, KNOWN[version], TESTED) == []


def test_uses_are_known_by_type_and_snapshots_are_there_on_both_sides_of_the_tested_version(tmp_path: Path) -> None:
    assert USES.unknown == []
    assert {"0.31", "0.32", "0.33"} <= KNOWN.keys()
    assert [vllm_warning(each, tmp_path) for each in (*TESTED_VLLM, "0.32.1+cpu")] == [None, None]


@pytest.mark.parametrize(
    "use",
    [
        "vllm.config:VllmConfig.parallel_config.tensor_parallel_size",
        "vllm.v1.kv_cache_interface:MambaSpec.mamba_cache_mode",
        "vllm.v1.request:Request.lora_request.lora_path",
        "vllm.v1.kv_offload.base:LookupResult.HIT",
        "vllm.v1.kv_cache_interface:SlidingWindowSpec",
        f"{BASE}.get_transfer_results",
    ],
)
def test_renamed_field_in_a_copy_of_a_snapshot_is_found(use: str) -> None:
    copy = dict(TESTED)
    copy[f"{use}_"] = copy.pop(use)
    assert [each for each in problems(USES, copy, TESTED) if use in each]


@pytest.mark.parametrize(
    ("use", "text", "said"),
    [
        (f"{BASE}.get_finished", "(finished_req_ids, steps)", "our get_finished(finished_req_ids) is called with"),
        (BASE, f"{TESTED[BASE]}, wait_for_all", "needs wait_for_all, which we have not"),
        ("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", "(dtype, block_size)", "does not take 4 arguments"),
        ("vllm.v1.kv_offload.tiering.base:JobResult()", "(job_id, is_done)", "does not take 0 arguments and ('job_id'"),
    ],
)
def test_changed_parameters_in_a_copy_of_a_snapshot_are_found(use: str, text: str, said: str) -> None:
    found = problems(USES, {**TESTED, use: text}, TESTED)
    assert found and all(said in each for each in found)


def test_use_that_no_snapshot_has_and_one_that_is_no_longer_used_are_found() -> None:
    use = "vllm.v1.request:Request.resumable"
    less = {each: text for each, text in TESTED.items() if each != use}
    assert problems(USES, less, less) == [f"nothing has {use}"]
    assert problems(USES, {**TESTED, "vllm:x": "value"}, TESTED) == ["vllm:x is in the snapshot and not used"]
