"""Doors of the `kvtide` command: what it says and does about a store and about servers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.doors.register import door
from tests.doors.user import BLOCK, PROMPT, RESTORED, answer, grant, kvtide, serving, status
from tests.families import model_of_family
from tests.server.worlds import token_of
from tests.stores import stored_records
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.engines.transformers import attach, load_model
from kvtide.server.auth import token_digest


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """A copy of a store with the prompt's blocks."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


@pytest.fixture(scope="module")
def filled(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("filled") / "store"
    answer(tiny_model, store, PROMPT, codec="cachegen:3")
    return store


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text(json.dumps(PROMPT[0].tolist()))
    return tmp_path / "tokens"


def explained(store: Path, tokens: Path, *words: Any) -> Any:
    space = stored_records(store)[0].header.id.namespace.hex()
    where = ("--tokens", tokens, "--namespace", space, "--block-tokens", BLOCK, "--store", store)
    return kvtide("explain", *where, *words)


@door("what a hit saves")
def test_explain_says_what_a_hit_saves_on_an_engine_and_a_link(store: Path, tokens: Path) -> None:
    assert explained(store, tokens)["saved_s"] is None
    here, far = (explained(store, tokens, "--prefill-tokens-s", 100, "--link-mbit-s", link) for link in (0, 1))
    assert here["saved_s"] == RESTORED / 100
    assert far["saved_s"] == pytest.approx(RESTORED / 100 - 8e-6 * kvtide("stats", "--store", store)["stored_bytes"])


@door("which group of layers ended a hit")
def test_explain_names_the_layers_whose_part_is_missing(tokens: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "groups"
    model_of_family("gemma3").save_pretrained(folder)
    model = load_model(folder)
    answer(model, store, PROMPT)
    words = ("explain", "--tokens", tokens, "--model", folder, "--block-tokens", BLOCK, "--store", store)
    whole = kvtide(*words)
    assert (whole["hit_tokens"], whole["ended_by"]) == (RESTORED, "")
    last = max(stored_records(store), key=lambda record: (record.header.label.start, record.header.sequence))
    kvtide("rm", last.header.id.key.hex(), "--store", store)
    said = kvtide(*words)
    names = [each.group.name for each in attach(model, "memory://", block_tokens=BLOCK).identity.groups]
    assert said["hit_tokens"] == RESTORED - BLOCK
    assert said["ended_by"] in names
    assert said["first_missing_key"] == last.header.id.key.hex()


@door("whether the quality is enough")
def test_explain_counts_coarse_blocks_as_missing(store: Path, tokens: Path) -> None:
    assert explained(store, tokens, "--quality", 1.0)["hit_tokens"] == RESTORED
    assert explained(store, tokens, "--quality", 1e-6)["hit_tokens"] == 0


@door("what is installed")
def test_doctor_looks_at_this_machine(store: Path) -> None:
    result = kvtide("doctor", "--store", store)
    assert result.keys() >= {"machine", "cpu", "commit", "command"} and str(store) in str(result["rows"])
    findings = {row["subject"]: row["status"] for row in result["rows"]}
    assert findings["native core"] == findings["torch"] == findings["store"] == "ok"


@door("make a token")
def test_token_comes_with_the_digest_for_the_server(tmp_path: Path) -> None:
    lines = CliRunner().invoke(app, ["token"]).stdout.splitlines()
    token, digest = (line.partition(" = ")[2] for line in lines)
    settings = grant("search").replace(token_digest(token_of("search")), digest)
    with serving(tmp_path, settings) as server:
        assert status(server, "GET", 1, Own_Authorization=f"Bearer {token}") == 404
