"""Runs of the demo, each in a process of its own: ask, measure, report. Started by `kvtide demo`.

Takes `DemoJob`s on stdin and gives a `DemoAnswer` to each question on stdout, a line of JSON each. A run is a fork of a
process that has imported torch, loaded the model and computed nothing, so that five runs do that once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import msgspec

from kvtide.cli.demo import DemoAnswer, DemoJob, DemoRun
from kvtide.cli.store import LIMITS
from kvtide.clock import SystemClock
from kvtide.engines import installed_profiles

_MARKER = "<<said>>"
# More than a question takes.
_QUESTION_TOKENS = 128


def _prompt_ids(tokenizer: Any, job: DemoJob, chat: Sequence[int], question: str) -> list[int]:
    """Return a question behind a chat's own tokens (its text might be cut otherwise), the first behind a text."""
    if chat:
        turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARKER}]
        said = [*turns, {"role": "user", "content": question}]
    else:
        said = [{"role": "user", "content": f"{_MARKER}\n\n{question}"}]
    head, _, tail = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False).partition(_MARKER)
    if not chat:
        chat = [*tokenizer(head).input_ids, *tokenizer(_text(job.context_tokens)).input_ids][: job.context_tokens]
        if len(chat) < job.context_tokens:
            raise ValueError(f"the demo's text has {len(chat)} tokens, {job.context_tokens} were asked for")
    return [*chat, *tokenizer(tail).input_ids]


def _runs(job: DemoJob, tokenizer: Any, model: Any) -> Iterator[DemoRun]:
    # Who chats with llama.cpp may not have it.
    from kvtide.engines.transformers import attach, model_fingerprint

    tensor = tokenizer(" ", return_tensors="pt").input_ids.new_tensor
    # The first call in a process pays for warm-up that has nothing to do with caching.
    model.generate(tensor([_prompt_ids(tokenizer, job, job.chat, "")[:8]]), max_new_tokens=2, do_sample=False)
    chat, clock, times_s = job.chat, SystemClock(), list[float]()
    # generate puts the prompt into it, then each token.
    watch = SimpleNamespace(put=lambda tokens: times_s.append(clock.monotonic_s()), end=lambda: None)
    known: dict[str, Any] = {}
    if job.store:
        known = {"profiles": installed_profiles(), "fingerprint": model_fingerprint(model), "limits": LIMITS}
    with attach(model, job.store, codec=job.codec, **known) if job.store else nullcontext() as cached:
        layout = cached.identity.layout if cached else None
        for question in job.questions:
            prompt_ids = _prompt_ids(tokenizer, job, chat, question)
            input_ids = tensor([prompt_ids])
            times_s[:] = [clock.monotonic_s()]
            wanted = {"attention_mask": input_ids.new_ones(input_ids.shape), "max_new_tokens": job.answer_tokens}
            output = (cached or model).generate(input_ids, streamer=watch, do_sample=False, **wanted)
            answer_ids = output[0][len(prompt_ids) :].tolist()
            # The chat's template brings the mark of the answer's end.
            chat = [*prompt_ids, *(token for token in answer_ids if token != tokenizer.eos_token_id)]
            last = cached.last if cached else None
            hit_tokens = last.hit_tokens if last else 0
            raw_bytes = hit_tokens // layout.tokens * layout.raw_bytes if layout else 0
            read_bytes = last.stored_bytes_read if last else 0
            said = tokenizer.decode(answer_ids, skip_special_tokens=True)
            yield DemoRun(len(prompt_ids), hit_tokens, times_s[2] - times_s[0], raw_bytes, read_bytes, said, chat)
        if cached:
            cached.flush(60.0)


def _llama_runs(job: DemoJob) -> Iterator[DemoRun]:
    """Ask a job's questions of a GGUF model in llama.cpp, each as if another chat had been in between."""
    from llama_cpp import Llama

    from kvtide.engines.llamacpp import attach as attach_llama

    room = max(len(job.chat), job.context_tokens) + len(job.questions) * (_QUESTION_TOKENS + job.answer_tokens)
    llm = Llama(job.model, n_ctx=room, n_batch=128, n_ubatch=128, verbose=False)
    clock, size = SystemClock(), job.context_tokens
    chat = list(job.chat) or llm.tokenize(_text(size).encode())[:size]
    # The first tokens in a process pay for warm-up.
    llm.eval(chat[:8])
    with attach_llama(llm, job.store, codec=job.codec, limits=LIMITS) if job.store else nullcontext() as cached:
        for question in job.questions:
            prompt = [*chat, *llm.tokenize(f"\n\nQuestion: {question}\nAnswer:".encode(), add_bos=False)]
            llm.reset()
            began_s, waits, answer = clock.monotonic_s(), list[float](), list[int]()
            for token in llm.generate(prompt, temp=0.0):
                waits.append(clock.monotonic_s() - began_s)
                answer += [token] if token != llm.token_eos() else []
                if len(waits) == job.answer_tokens or token == llm.token_eos():
                    break
            chat = [*prompt, *answer]
            hit_tokens = cached.last.hit_tokens if cached and cached.last else 0
            said = llm.detokenize(answer).decode(errors="replace")
            yield DemoRun(len(prompt), hit_tokens, waits[0], 0, 0, said, chat)
        if cached:
            cached.flush(60.0)


def _text(tokens: int) -> str:
    return "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics))[: 8 * tokens]


def _say(answer: DemoAnswer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    """Do the jobs on stdin, one after the other, each in a child of this process. Ctrl-C ends all without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loaded: tuple[Any, Any] | None = None
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=DemoJob)
        try:
            if not job.model and loaded is None:
                from kvtide.engines.transformers import load_to_fork

                loaded = load_to_fork()
        except ValueError as error:
            _say(str(error))
            return
        child = os.fork()
        if child == 0:
            try:
                for result in _llama_runs(job) if loaded is None else _runs(job, *loaded):
                    _say(result)
            except ValueError as error:
                _say(str(error))
            # Python would take two seconds to let go of torch.
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            _say(None)


if __name__ == "__main__":
    main()
