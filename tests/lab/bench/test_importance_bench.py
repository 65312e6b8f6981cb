"""The generator of questions, and the shape of what the bench says."""

import random
from typing import Any

import pytest
import torch
from tests.codec.tide_profiles import fitted, fitted_on
from tests.families import tiny_llama

from kvtide.block import KVDtype
from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.groups import model_layout
from kvtide_lab.bench.importance import QUICK, RATES, USES, engine_rows, run
from kvtide_lab.bench.importance_prompts import DEPTHS, _tasks, make_task, make_tasks, needle_rows
from kvtide_lab.judge.importance_judge import ImportanceJudge

pytestmark = pytest.mark.usefixtures("any_block_fits")

TEXT = "\n".join(f"This is line number {n} of a text about nothing." for n in range(200))
OTHERS = ["\n".join(f"Another text altogether, its line {n} says so." for n in range(50))]


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_task_has_its_needles_and_right_answers_in_the_text() -> None:
    task = make_task(TEXT, OTHERS, 6000, tokenize, random.Random(3))
    text = "".join(map(chr, task.ids))
    assert len(task.ids) == 6000
    asked = [*task.uses, *task.questions]
    found = [each for each in asked if each.kind == "retrieval"]
    assert len(found) == 4
    for each in found:
        assert each.answer is not None and each.answer.strip() in text
    for each in (each for each in asked if each.kind == "choice"):
        lines = {line[0]: line[3:] for line in each.words.splitlines() if line[1:2] == ")"}
        assert lines.pop(each.answer.strip()) in TEXT
        assert not any(line in TEXT for line in lines.values())


def test_tasks_are_made_of_texts_that_are_long_enough() -> None:
    texts = [Text("short", "prose", "short"), Text("long", "prose", TEXT), Text("other", "prose", TEXT[::-1])]
    assert len(make_tasks(texts, 1, 500, tokenize)) == 1
    assert len(make_tasks(texts, 9, 500, tokenize)) == 2
    with pytest.raises(ValueError, match="no text has 500 tokens"):
        make_tasks(texts[:1], 1, 500, tokenize)


@pytest.fixture
def random_model() -> Any:
    """The tiny model with words enough for noise."""
    return tiny_llama(vocab_size=1100)


def test_needles_lie_at_their_depths_and_are_asked_for(random_model: Any) -> None:
    registry = CodecRegistry([fitted(model_layout(random_model, 32))])
    judge = ImportanceJudge(random_model, registry, SystemClock(), 1e9, KVDtype.FLOAT32, 32)
    texts = [Text("one", "prose", TEXT), Text("two", "python", TEXT[::-1]), Text("three", "c header", "short")]
    rows = needle_rows(judge, texts, 512, 4, 0.25, tokenize, lambda *_: None)
    asked = [(kind, depth, 1) for kind in ("prose", "code") for depth in DEPTHS]
    assert [(row.kind, row.depth, row.needles) for row in rows] == asked
    assert all(row.found_both <= min(row.found_whole, row.found_part) <= 1 for row in rows)
    ((ids, questions),) = _tasks(texts[:1], 2000, tokenize, random.Random(0))
    text, places = "".join(map(chr, ids)), []
    for question in questions:
        words, code = ("".join(map(chr, each)) for each in (question.ids, question.right))
        places.append(text.index(f"The pass code of {words.split()[-2]} is{code}.") / 2000)
    assert len(ids) == 2000 and places == pytest.approx(DEPTHS, abs=0.1)


def test_a_table_can_be_asked_for_alone(random_model: Any) -> None:
    texts = [Text("one", "prose", TEXT), Text("two", "python", TEXT[::-1])]
    profiles = [fitted(model_layout(random_model, 256))]
    asked = (random_model, "m", tokenize, texts, profiles, QUICK._replace(context_tokens=768), 1e9, lambda *_: None)
    found = run(*asked, tables=["needles"])
    assert [row.kind for row in found.needles] == ["prose"] * len(DEPTHS) + ["code"] * len(DEPTHS)
    assert not (found.rows or found.engine or found.ttft)
    assert found.ttft_speedup is None
    with pytest.raises(ValueError, match="no table needle, expected some of selectors, engine, needles"):
        run(*asked, tables=["needle"])


def test_the_engine_takes_a_part_and_the_whole_and_then_the_faster(random_model: Any) -> None:
    ids = torch.randint(0, 1000, (512,), generator=torch.Generator().manual_seed(1)).tolist()
    layout = model_layout(random_model, 256)
    profile = fitted_on(random_model, layout, torch.tensor([ids]))
    uses = [[number, 7, 9] for number in range(1 + USES)]
    found = engine_rows(random_model, [profile], ids, uses, [3, 4, 5], 0.25, 1, SystemClock())
    asked = [(place, use) for place in RATES for use in ("first", "after five")]
    assert [(row.place, row.use) for row in found] == asked
    assert all(row.front_share > 0 and row.decided in {"part", "whole"} for row in found)
