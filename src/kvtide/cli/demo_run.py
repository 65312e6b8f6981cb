"""Runs of the demo, each in a process of its own: answer, report. Started by `kvtide demo`.

Takes `DemoJob`s on stdin and gives a `DemoAnswer` to each on stdout, a line of JSON each. A run is a fork of a process
that has imported torch, loaded the model and computed nothing, so that six runs do that once.
"""

from __future__ import annotations

import os
import sys
from pydoc_data.topics import topics
from typing import Any

import msgspec

from kvtide.cli.demo import DemoAnswer, DemoJob, DemoRun
from kvtide.clock import SystemClock
from kvtide.engines import installed_profiles
from kvtide.engines.calibrate import restored_kl
from kvtide.engines.transformers import CachedModel, attach, load_to_fork, model_fingerprint

_QUESTION = "\n\nIn one or two sentences: what is this text about?"


class _Watch:
    """A streamer that notes the time of each token that generate puts; the first call brings the prompt."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._times_s = [self._clock.monotonic_s()]

    def put(self, value: Any) -> None:
        self._times_s.append(self._clock.monotonic_s())

    def end(self) -> None:
        pass

    @property
    def ttft_s(self) -> float:
        return self._times_s[2] - self._times_s[0]


def _prompt_ids(tokenizer: Any, prefix_tokens: int) -> list[int]:
    text = "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics))
    marker = "<<context>>"
    chat = [{"role": "user", "content": f"{marker}{_QUESTION}"}]
    head, _, tail = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).partition(marker)
    head_ids, text_ids = tokenizer(head).input_ids, tokenizer(text[: 8 * prefix_tokens]).input_ids
    shared = [*head_ids, *text_ids][:prefix_tokens]
    if len(shared) < prefix_tokens:
        raise ValueError(f"the demo's text has {len(shared)} tokens, {prefix_tokens} were asked for")
    return [*shared, *tokenizer(tail).input_ids]


def _run(job: DemoJob, tokenizer: Any, model: Any) -> DemoRun:
    input_ids = tokenizer(" ", return_tensors="pt").input_ids.new_tensor([_prompt_ids(tokenizer, job.prefix_tokens)])
    # The first call in a process pays for warm-up that has nothing to do with caching.
    model.generate(input_ids[:, :8], max_new_tokens=2, do_sample=False)
    name = model_fingerprint(model)
    profiles = installed_profiles()
    with attach(model, job.store, codec=job.codec, profiles=profiles, fingerprint=name) as cached:
        found = _answer(job, cached, tokenizer, input_ids)
        if not job.exact:
            return found
        with attach(model, job.store, codec=job.exact, fingerprint=name) as exact:
            return msgspec.structs.replace(found, kl=restored_kl(cached, exact, input_ids, found.answer_ids))


def _answer(job: DemoJob, cached: CachedModel, tokenizer: Any, input_ids: Any) -> DemoRun:
    """Return measurements of a call of generate."""
    was_warm = cached.hit_tokens(input_ids) > 0
    # A cold run on a warm store measures the full prefill all the same.
    generate = cached.model.generate if job.is_cold and was_warm else cached.generate
    watch, mask = _Watch(), input_ids.new_ones(input_ids.shape)
    wanted = {"attention_mask": mask, "max_new_tokens": job.answer_tokens, "do_sample": False}
    output = generate(input_ids, streamer=watch, **wanted)
    cached.flush(60.0)
    answer_ids = output[0][input_ids.shape[1] :].tolist()
    last, used_bytes = cached.last, cached.cache.stats().tiers[-1].used_bytes
    return DemoRun(
        prompt_tokens=input_ids.shape[1],
        hit_tokens=last.hit_tokens if last else 0,
        was_warm=was_warm,
        ttft_s=watch.ttft_s,
        raw_bytes=job.prefix_tokens // cached.layout.tokens * cached.layout.raw_bytes,
        stored_bytes=last.stored_bytes_read if last else used_bytes,
        answer_ids=answer_ids,
        answer=tokenizer.decode(answer_ids, skip_special_tokens=True),
    )


def _answered(job: DemoJob, tokenizer: Any, model: Any) -> DemoAnswer:
    try:
        return DemoAnswer(_run(job, tokenizer, model))
    except ValueError as error:
        return DemoAnswer(mistake=str(error))


def _say(answer: DemoAnswer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    """Do the jobs on stdin, one after the other, each in a child of this process."""
    loaded: tuple[Any, Any] | None = None
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=DemoJob)
        try:
            loaded = loaded or load_to_fork()
        except ValueError as error:
            _say(DemoAnswer(mistake=str(error)))
            return
        child = os.fork()
        if child == 0:
            _say(_answered(job, *loaded))
            # Python would take two seconds to let go of torch.
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            _say(DemoAnswer())


if __name__ == "__main__":
    main()
