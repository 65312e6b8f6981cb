"""Profiles of models: `kvtide calibrate` fits one to texts; `kvtide profile` keeps them in a store."""

from __future__ import annotations

import hashlib
import math
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from kvtide.cli.report import JsonOption, format_bytes, narrow_table, progress_bars, say
from kvtide.cli.store import (
    DEFAULT_STORE,
    STATS_LIMIT,
    HeadsOption,
    StoreOption,
    adding,
    changing,
    listed,
    looking_at,
    rows_of,
)
from kvtide.clock import SystemClock
from kvtide.codec import Profile
from kvtide.codec.published import ProfileFitter
from kvtide.codec.tide import COSTS
from kvtide.config import TENANT_SALT_VARIABLE, cache_home
from kvtide.engines import installed_profiles, option_bytes, read_profile
from kvtide.store.profiles import ProfileStore, ProfileVersion, newest_of, profile_name
from kvtide.tier import Tier, shown_url

app = typer.Typer(help="Profiles of models: what lossy codecs know of each, kept in the store.", no_args_is_help=True)

FingerprintOption = Annotated[
    str, typer.Option(help="The engine's option of that name, if it was given one; hex:… for digits.")
]
SaltOption = Annotated[
    str, typer.Option(envvar=TENANT_SALT_VARIABLE, help="The engine's option of that name; hex:… for digits.")
]
DigestArgument = Annotated[str, typer.Argument(help="Leading hex digits of the profile's digest.")]
TextOption = Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be given several times.")]

_TIDE_KINDS = tuple(f"tide-{cost}" for cost in COSTS)
_KINDS = (*ProfileFitter.KINDS, *_TIDE_KINDS)
_SEED = 1
_GGUF = ".gguf"
_Progress = Callable[[str, int, int], None]


class ProfileRow(msgspec.Struct, frozen=True):
    """A profile by its digest: where it is ("" if not here), whether a model encodes by it, and what needs it."""

    profile: str
    model: str
    codec: str
    found: str
    is_newest: bool
    profile_bytes: int
    objects: int = 0
    stored_bytes: int = 0


def _names_of(folder: Path, fingerprint: str, tenant_salt: str, model: Any = None) -> list[bytes]:
    """A tenant's names of a model: by its engines' fingerprint, or by its weight files and as it is in each dtype.

    model: the folder's, if it is loaded already, in float32. ValueError if it has no weight files.
    """
    salt = option_bytes(tenant_salt)
    if fingerprint:
        return [profile_name(option_bytes(fingerprint), salt)]
    from kvtide.engines.paged import files_fingerprint, gguf_fingerprint

    if folder.suffix == _GGUF:
        return [profile_name(gguf_fingerprint(folder), salt)]
    from kvtide.engines.transformers import fingerprint_in, load_model, model_fingerprint

    found = [files_fingerprint(folder, {}), model_fingerprint(model := model or load_model(folder))]
    for dtype in ("bfloat16", "float16"):
        found.append(fingerprint_in(model, dtype) or model_fingerprint(load_model(folder, dtype)))
    return [profile_name(each, salt) for each in found]


def _folder_of(model: Path) -> Path:
    """Return a model's folder; a GGUF file is converted once, UnsupportedModel if llama.cpp takes no profile of it."""
    if model.is_dir():
        return model
    check_lossy(model)
    from kvtide.engines.paged import gguf_fingerprint
    from kvtide.engines.transformers import converted

    return converted(f"{model.stem}-{gguf_fingerprint(model)[:8].hex()}", lambda: model)


def _put(url: str, profiles: Sequence[Profile], names: Sequence[bytes]) -> None:
    with adding(url) as tier:
        for each in profiles:
            ProfileStore(tier).put(each, names, SystemClock().wall_s())


@app.command()
def put(
    file: Annotated[Path, typer.Argument(help="A profile, as `kvtide calibrate --output` writes it.")],
    model: Annotated[Path | None, typer.Option(help="The folder of the model that it is of.")] = None,
    fingerprint: FingerprintOption = "",
    tenant_salt: SaltOption = "",
    url: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Put a profile into a store, as the newest of a model: engines take it within minutes."""
    if (model is None) == (not fingerprint):
        raise ValueError("say whose profile it is: --model FOLDER, or the --fingerprint that its engines are given")
    profile, names = read_profile(file), _names_of(model or Path(), fingerprint, tenant_salt)
    _put(url, [profile], names)
    digest = profile.digest.hex()
    result = {"store": url, "profile": digest, "codec": profile.kind, "names": len(names)}
    say(result, as_json, f"put {profile.kind} profile {digest[:12]}")


@app.command()
def get(
    digest: DigestArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    url: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Fetch a profile out of a store."""
    with looking_at(url) as tier:
        store = ProfileStore(tier, may_remove=False)
        found = store.read(_chosen(store, digest))
    if found is None:
        raise ValueError(f"the store has not all of profile {digest}")
    output.write_bytes(found.to_bytes())
    line = f"{escape(str(output))}: {found.kind} profile {found.digest.hex()[:12]} of {escape(found.model)}"
    say({"store": url, "profile": found.digest.hex(), "file": str(output)}, as_json, line)


@app.command()
def ls(
    profile: Annotated[list[Path] | None, typer.Option(help="Profiles beside those that are installed.")] = None,
    url: StoreOption = DEFAULT_STORE,
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """List the profiles that a store has and those that its blocks need: a block without its profile is a miss."""
    with looking_at(url) as tier:
        found, looked_into = _rows(tier, limit, profile or [])
    shown = []
    for each in found:
        here = ("newest" if each.is_newest else "yes") if each.found else "no"
        figures = (format_bytes(each.profile_bytes), str(each.objects), format_bytes(each.stored_bytes))
        shown.append((each.profile[:12], each.model, each.codec, here, *figures))
    table = narrow_table(("profile", "model", "codec", "here", ">size", ">blocks", ">stored"), shown)
    lines = [table if found else f"no profiles, and none of {looked_into} blocks needs one"]
    if any(not each.found for each in found):
        lines.append("What is not here is a miss: kvtide profile put FILE --model FOLDER")
    say({"store": url, "looked_into": looked_into, "rows": found}, as_json, *lines)


def _rows(tier: Tier, limit: int, files: Sequence[Path]) -> tuple[list[ProfileRow], int]:
    known = {each.digest.hex(): "installed" for each in installed_profiles()}
    known |= {read_profile(path).digest.hex(): str(path) for path in files}
    objects = rows_of(tier, listed(tier)[: limit or None])
    store = ProfileStore(tier)
    records = store.all()
    by_model: dict[tuple[str, str], list[ProfileVersion]] = {}
    for each in records:
        by_model.setdefault((each.name, each.kind), []).append(each)
    newest = {next((each.digest for each in newest_of(versions)), "") for versions in by_model.values()}
    rows: dict[str, ProfileRow] = {}
    for each in records:
        is_here = store.use(bytes.fromhex(each.digest), each.profile_bytes)
        where = "store" if is_here else known.get(each.digest, "")
        is_newest = is_here and each.digest in newest
        rows[each.digest] = ProfileRow(each.digest, each.model, each.kind, where, is_newest, each.profile_bytes)
    for row in objects:
        if row.profile:
            plain = ProfileRow(row.profile, row.model, row.codec, known.get(row.profile, ""), False, 0)
            so_far = rows.get(row.profile, plain)
            sums = {"objects": so_far.objects + 1, "stored_bytes": so_far.stored_bytes + row.stored_bytes}
            rows[row.profile] = msgspec.structs.replace(so_far, **sums)
    # One that was removed and that nothing needs is over.
    return [rows[digest] for digest in sorted(rows) if rows[digest].found or rows[digest].objects], len(objects)


@app.command()
def rm(
    digest: DigestArgument,
    url: StoreOption = DEFAULT_STORE,
    limit: HeadsOption = STATS_LIMIT,
    is_sure: Annotated[bool, typer.Option("--yes", help="Also if blocks still need it: they will be misses.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a profile from a store, unless blocks among those looked into still need it."""
    with changing(url) as tier:
        store = ProfileStore(tier)
        chosen = _chosen(store, digest)
        rows, looked_into = _rows(tier, limit, [])
        needed = sum(row.objects for row in rows if row.profile == chosen.hex())
        if needed and not is_sure:
            raise ValueError(f"{needed} of {looked_into} objects need profile {digest}: --yes makes them misses")
        models = store.remove(chosen, SystemClock().wall_s())
    line = f"removed {chosen.hex()[:12]}; {needed} of {looked_into} objects needed it"
    say({"store": url, "profile": chosen.hex(), "names": models, "objects": needed}, as_json, line)


def _chosen(store: ProfileStore, digits: str) -> bytes:
    """The digest of the one profile that begins so. ValueError for none or several, and for no digit."""
    found = {each.digest for each in store.all() if digits and each.digest.startswith(digits.lower())}
    if len(found) != 1:
        raise ValueError(f"{len(found)} profiles of the store are named by {digits!r}: see `kvtide profile ls`")
    return bytes.fromhex(found.pop())


def calibrate(
    model: Annotated[str | None, typer.Argument(help="A model folder, or a GGUF file; default: SmolLM2-135M.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file to write the profile to.")] = None,
    url: Annotated[str | None, typer.Option("--store", help="The store in which engines look for it.")] = None,
    fingerprint: FingerprintOption = "",
    tenant_salt: SaltOption = "",
    text: TextOption = None,
    pieces: Annotated[
        int, typer.Option("--snippets", min=0, help="Instead of whole texts, so many pieces of files of many kinds.")
    ] = 0,
    codec: Annotated[str, typer.Option(help=f"One of {', '.join(_KINDS)}.")] = "tide-layer",
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of each text.")] = 1664,
    seconds: Annotated[float, typer.Option(help="Stop after so long; run it again to go on.")] = math.inf,
    memory: Annotated[int, typer.Option("--memory-bytes", min=0, help="Take no more memory than this; 0: any.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit a profile: what a codec needs to know of one model, from texts, once.

    A model with several groups of layers (windows, latents, states beside attention) gets one of tide for each group
    that keeps rows of tokens; files of all but the first are FILE-1, FILE-2, ….

    With --store the model's engines find it, also those that run already. Profiles of tide are fitted in four passes;
    one that was stopped goes on.
    """
    from kvtide.engines.calibrate import read_texts, snippets
    from kvtide.engines.transformers import converted_folder

    if codec not in _KINDS:
        raise ValueError(f"profiles are made for {', '.join(_KINDS)}, got --codec {codec!r}")
    if output is None and url is None:
        raise ValueError("say where the profile is to go, as in kvtide calibrate FOLDER --store URL, or --output FILE")
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ValueError(f"--output names a file, in a folder that is there, got {output}")
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    own = [each.content for each in (read_texts(text) if text else snippets(pieces) if pieces else [])]
    folder = _folder_of(Path(model)) if model else converted_folder()
    if url:
        # What is wrong with the store is an error now, and not when all is done.
        with adding(url):
            pass
    subject = _Subject(folder, tokens)
    names = _names_of(Path(model) if model else folder, fingerprint, tenant_salt, subject.model) if url else []
    partial = _partial(output, folder, codec)
    with progress_bars() as bars:
        if codec in _TIDE_KINDS:
            profiles, report = _tide(subject, own, codec.removeprefix("tide-"), partial, _telling(bars, seconds))
            if model and model.endswith(_GGUF):
                # What is left takes minutes, and would begin again if it were stopped.
                profiles, report = _judged(Path(model), subject, profiles, report, _telling(bars, math.inf))
        else:
            profiles, report = [_published(subject, own, codec, _telling(bars, seconds))], {}
    if output is not None:
        for number, each in enumerate(profiles):
            (output.with_stem(f"{output.stem}-{number}") if number else output).write_bytes(each.to_bytes())
    if url:
        _put(url, profiles, names)
    if codec in _TIDE_KINDS:
        partial.unlink(missing_ok=True)  # not before: a store that went away meanwhile costs no second fitting
    _say(output, url, codec, profiles, report, as_json)


def _say(
    output: Path | None, url: str | None, codec: str, profiles: Sequence[Profile], report: dict[str, Any], as_json: bool
) -> None:
    first, sizes = profiles[0], [len(each.to_bytes()) for each in profiles]
    names = {"profile": str(output or ""), "store": url or "", "codec": codec, "model": first.model}
    counts = {"texts": first.texts, "tokens": first.tokens, "profile_bytes": sum(sizes)}
    rows = [
        {"group": each.group, "digest": each.digest.hex(), "profile_bytes": size}
        for each, size in zip(profiles, sizes, strict=True)
    ]
    where = " and ".join(filter(None, (str(output or ""), url and shown_url(url))))
    made = f"{escape(where)}: {format_bytes(sum(sizes))}, fitted on {first.tokens} tokens of {first.texts} texts"
    digests = [f"digest {each.digest.hex()} {escape(each.group)}".rstrip() for each in profiles]
    result = {**names, "digest": first.digest.hex(), **counts, **report, "rows": rows}
    say(result, as_json, made, *digests, *(_shown(report) if report else ()))


def _shown(report: dict[str, Any]) -> Iterator[Any]:
    """A calibration of tide as people see it."""
    table = Table("step", "bits an element", "KL", title=f"Predicted, from {report['held_out_texts']} held-out texts")
    for point in report["points"]:
        table.add_row(str(point["step_units"]), f"{point['bits_per_element']:.3f}", f"{point['kl']:.5f}")
    yield table
    if noise := report.get("llama_noise"):
        yield f"llama.cpp's own rounding adds {noise:.5f}: what is asked for has to be more"
    ratio = report["held_out_over_fitted"]
    if ratio is None:
        yield "too few texts to hold any out: the table is that of texts that were fitted on"
        return
    verdict = " [bold]: overfitted, give more texts[/]" if report["is_overfitted"] else ""
    if report["texts_wanted"]:
        verdict += f"; about {report['texts_wanted']} more texts would halve that"
    yield f"held-out texts take {100 * (ratio - 1):+.1f} % bits of what fitted ones do{verdict}"


class _Subject:
    """The model, and texts as its token ids."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from kvtide.engines import transformers

        self.model = transformers.load_model(folder)
        self.name = folder.name
        self.block_tokens = transformers.BLOCK_TOKENS
        config = self.model.config.get_text_config(decoder=True)
        # Learned positions, as GPT-2's 1,024, have an end.
        self._tokens = min(tokens, getattr(config, "max_position_embeddings", None) or tokens)
        self._tokenizer: Any = None
        if any(folder.glob("tokenizer*")) or (folder / "vocab.json").exists():
            self._tokenizer = transformers.load_tokenizer(folder)
        else:
            print(f"no tokenizer in {folder}: tokens are bytes of the texts, and any", file=sys.stderr)

    def ids(self, contents: Sequence[str]) -> list[list[int]]:
        """Return the first tokens of each text; without a tokenizer its bytes, and as many texts of random tokens."""
        if self._tokenizer is not None:
            return [self._tokenizer(each[: 8 * self._tokens]).input_ids[: self._tokens] for each in contents]
        size = self.model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng([_SEED, len(contents)])
        found = [[byte % size for byte in content.encode()[: self._tokens]] for content in contents]
        return [*found, *(rng.integers(0, size, len(ids)).tolist() for ids in found)]


def _telling(bars: _Progress, seconds: float) -> _Progress:
    """Tell of each text, in lines where stderr is no terminal, and end the fitting when its time is over."""
    clock = SystemClock()
    started_s = clock.monotonic_s()

    def show(step: str, done: int, total: int) -> None:
        bars(step, done, total)
        if not sys.stderr.isatty():
            print(f"{step} {done}/{total}", file=sys.stderr, flush=True)
        if clock.monotonic_s() - started_s > seconds:
            raise ValueError(f"stopped after {seconds:.0f} s, at text {done} of {total}: run it again to go on")

    return show


def _partial(output: Path | None, folder: Path, codec: str) -> Path:
    if output is not None:
        return output.with_name(f"{output.name}.partial")
    name = hashlib.sha256(f"{folder.resolve()} {codec}".encode()).hexdigest()
    return cache_home() / "calibrations" / f"{name[:32]}.partial"


def _published(subject: _Subject, own: Sequence[str], codec: str, show: _Progress) -> Profile:
    from kvtide.engines.calibrate import calibration_texts
    from kvtide.engines.transformers import ModelContexts, model_layout

    layout = model_layout(subject.model, subject.block_tokens)
    fitter, contexts = ProfileFitter(codec, subject.name, layout), ModelContexts(subject.model, subject.block_tokens)
    all_ids = subject.ids(own or [each.content for each in calibration_texts()])
    all_ids = [ids for ids in all_ids if len(ids) >= subject.block_tokens]
    for number, ids in enumerate(all_ids):
        show("texts", number, len(all_ids))
        (blocks,) = contexts.capture(ids).blocks
        if not fitter.deviation.any():
            fitter.scale(blocks)
        for bits in blocks:
            fitter.add(bits)
    show("texts", len(all_ids), len(all_ids))
    return fitter.profile(len(all_ids))


def _tide(
    subject: _Subject, own: Sequence[str], cost: str, partial: Path, show: _Progress
) -> tuple[list[Profile], dict[str, Any]]:
    """own: some of these texts are judged on; empty for those of the package, which has others to judge on."""
    from kvtide.engines import calibrate as fitting

    if own:
        least = subject.block_tokens + fitting.JUDGED_TOKENS + 1
        split, unlike = fitting.split_texts([ids for ids in subject.ids(own) if len(ids) >= least]), 1.0
    else:
        of_package = (fitting.calibration_texts(), fitting.held_out_texts())
        split = fitting.TextSplit(*(subject.ids([each.content for each in texts]) for texts in of_package))
        unlike = fitting.HELD_OUT_UNLIKE
    parts = (subject.model, subject.name, cost, split, subject.block_tokens, partial, unlike)
    profiles, report = fitting.TideCalibration(*parts).run(show)
    return profiles, msgspec.to_builtins(report)


def _judged(
    file: Path, subject: _Subject, profiles: list[Profile], report: dict[str, Any], show: _Progress
) -> tuple[list[Profile], dict[str, Any]]:
    """Add llama.cpp's own noise to the curves of profiles, as its answers tell it, and say so in the report."""
    from kvtide.engines.calibrate import held_out_texts

    try:
        losses = llama_losses(file, profiles, subject.ids([each.content for each in held_out_texts()]), show)
    except (ImportError, ValueError) as error:
        print(f"llama.cpp has not judged this profile: {error}", file=sys.stderr)
        return profiles, report
    # The median: of single texts it is a third to four times that, which no step takes away.
    noise = float(np.median(losses))
    return [with_noise(each, noise) for each in profiles], report | {"llama_noise": noise}


# GGUF models are fitted in transformers, and judged by llama.cpp's own answers too. It rounds what it multiplies to a
# few bits, so that the smallest change of a cache moves its answers: its noise, which no step of a codec takes away. A
# profile's curves have it in them, for a quality to be what llama.cpp says.

# The point of a profile's curve at which noise is measured: finer ones are so fine that blocks are stored losslessly.
_FINE_POINT = 1
# A batch, and the tokens that are judged behind a restored context. A busy machine may be too late with a block.
_BATCH_TOKENS, _FLUSH_S_MAX, _TRIES = 128, 300.0, 3
# Where a step's own loss is less than this part of the noise, the curve of both falls as that of the loss alone.
_HEARD = 8


def check_lossy(model: Path) -> None:
    """Raise UnsupportedModel, with the reason, if llama.cpp is here and can't keep a model's rows by tide."""
    try:
        import llama_cpp
    except ImportError:
        return
    from kvtide.engines.llamacpp import attach

    with closing(llama_cpp.Llama(str(model), n_ctx=_BATCH_TOKENS, verbose=False)) as llm:
        attach(llm, "memory://", codec="tide")


def llama_losses(
    model: Path,
    profiles: Sequence[Profile],
    texts: Sequence[Sequence[int]],
    show: _Progress,
    quality: float | None = None,
) -> list[float]:
    """Return the KL of the next token, in nats, behind each text once its blocks went through tide, by llama.cpp.

    profiles: of one calibration. quality: None for one that leaves them nearly whole, and little but llama.cpp's noise.
    texts: token ids. Those of which nothing is restored, or that are stored losslessly, are left out. ImportError
    without llama-cpp-python; ValueError if that is all of them, and for models whose rows can't be lossy in llama.cpp.
    """
    import llama_cpp

    from kvtide.engines.llamacpp import attach

    if quality is None:
        arrays = profiles[0].arrays
        quality = float(arrays.get("trellis_curve", arrays["curve"])[_FINE_POINT, 2])
    codec = f"{profiles[0].kind.removesuffix('-layer')}:{quality}"
    room, found = max(map(len, texts)) + _BATCH_TOKENS, list[float]()
    llm = llama_cpp.Llama(str(model), n_ctx=room, n_batch=_BATCH_TOKENS, verbose=False)
    with closing(llm), attach(llm, "memory://", codec=codec, profiles=profiles) as cached:
        for number, ids in enumerate(texts):
            show("llama.cpp", number, len(texts))
            tokens = max(0, len(ids) - _BATCH_TOKENS - 1) // cached.served.step * cached.served.step
            exact = _said(llm, ids, tokens)
            cached.flush(_FLUSH_S_MAX)
            for _ in range(_TRIES if tokens else 0):
                said = _said(llm, ids, tokens)
                if cached.last is not None and cached.last.hit_tokens == tokens:
                    kl = float((np.exp(exact) * (exact - said)).sum(-1).mean())
                    found += [kl] if kl > 0 else []
                    break
    if not found:
        raise ValueError(f"none of {len(texts)} texts is long enough, fits the profile and was restored in time")
    return found


def _said(llm: Any, ids: Sequence[int], tokens: int) -> NDArray[np.float64]:
    """Return log probabilities of what follows the tokens behind so many, which are computed or restored."""
    llm.reset()
    with closing(llm.generate(ids[: tokens + 1], temp=0.0)) as answer:
        next(answer)
    behind = ids[tokens + 1 :][:_BATCH_TOKENS]
    llm._batch.set_batch(behind, llm.n_tokens, True)
    llm._ctx.decode(llm._batch)
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(behind), llm.n_vocab())).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def with_noise(profile: Profile, noise: float) -> Profile:
    """Return a profile whose curves have llama.cpp's noise in them, and fall where that is all there is."""
    curves = {name: profile.arrays[name].copy() for name in ("curve", "trellis_curve") if name in profile.arrays}
    for curve in curves.values():
        curve[:, 2] += np.minimum(noise, _HEARD * curve[:, 2])
    return profile.with_arrays(curves)
