"""Following without engines: who is asked what, and what the rows say of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtide_lab.bench import follow
from kvtide_lab.bench.follow import FollowSize

SIZE = FollowSize(rounds=2, prompt_tokens=40, answer_tokens=3, step_tokens=16)


class _Engine:
    """Computes a token in a tenth of a second; who follows has the first token a second after that."""

    asked: list[tuple[str, int]]

    def __init__(self, transfer: dict[str, Any], options: dict[str, Any]) -> None:
        assert options == {"max_num_batched_tokens": SIZE.step_tokens}
        config = transfer["kv_connector_extra_config"]
        self._name = "B" if "follow_s" in config else "A"
        # Three steps of 4 s altogether, and four of them.
        assert config.get("follow_s", 16 / 3) == pytest.approx(16 / 3)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, ids: Any, answer_tokens: int) -> dict[str, Any]:
        _Engine.asked.append((self._name, ids[0]))
        seconds = len(ids) / 10 + (self._name == "B")
        return {"ids": [ids[0]], "ttft_s": seconds, "seconds": seconds, "cached_tokens": 32 * (self._name == "B")}

    def generate(self, prompts: Any) -> dict[str, Any]:
        return {"answers": [self.ask(prompts[0]["ids"], 1)], "cpu_s": 2.0, "process_cpu_s": 0.5}

    def do(self, verb: str) -> dict[str, Any]:
        return {"is_done": True}


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(words: Any) -> Iterator[Any]:
        yield type("Server", (), {"port": 1})

    monkeypatch.setattr(follow, "started", started)
    monkeypatch.setattr(follow, "CUT_S", 0.0)
    monkeypatch.setattr(follow, "CUT_AT", 0.0)
    monkeypatch.setattr(_Engine, "asked", [], raising=False)


@pytest.mark.usefixtures("_no_server")
def test_every_followed_prompt_stands_beside_one_that_nobody_follows() -> None:
    engine: Any = _Engine
    result = follow.run(engine, "model", range(600), 100.0, ["raw", "tide"], SIZE, lambda *step: None)
    assert [row.codec for row in result.rows] == ["raw", "tide"]
    row = result.rows[0]
    assert (row.engine_cpu.median, row.slowdown.median, row.ttft_ratio.median, row.cut_ttft_ratio) == (
        1.0,
        1.0,
        1.25,
        1.25,
    )
    assert (row.lag_s.median, row.restored_tokens, row.changed, row.idle_cpu) == (1.0, 32, 0, 0.1)
    # Of each codec: alone, followed, alone, followed, and the one with the cut.
    own = [each for each in _Engine.asked[: len(_Engine.asked) // 2] if each[1] >= 300]
    assert sorted(number for name, number in own if name == "A") == [300, 340, 380, 420, 460]
    assert sorted(number for name, number in own if name == "B") == [340, 420, 460]
    assert follow.table(result).row_count == 2


def test_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="must have"):
        follow.run(_Engine, "model", range(10), 100.0, [], SIZE, lambda *step: None)  # type: ignore[arg-type]
