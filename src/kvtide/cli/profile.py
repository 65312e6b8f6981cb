"""`kvtide profile`: profiles of models in a store, put, fetched, listed and removed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes, narrow_table
from kvtide.cli.store import (
    DEFAULT_STORE,
    STATS_LIMIT,
    HeadsOption,
    StoreOption,
    changing,
    listed,
    looking_at,
    opened,
    rows_of,
)
from kvtide.clock import SystemClock
from kvtide.codec import Profile
from kvtide.config import TENANT_SALT_VARIABLE, Limits
from kvtide.engines import installed_profiles, option_bytes, read_profile
from kvtide.store import ProfileStore, ProfileVersion, newest_of, profile_name
from kvtide.tier import Tier, open_tier

app = typer.Typer(help="Profiles of models: what lossy codecs know of each, kept in the store.", no_args_is_help=True)

FingerprintOption = Annotated[
    str, typer.Option("--fingerprint", help="The engine's option of that name, if it was given one; hex:… for digits.")
]
SaltOption = Annotated[
    str,
    typer.Option(
        "--tenant-salt", envvar=TENANT_SALT_VARIABLE, help="The engine's option of that name; hex:… for digits."
    ),
]
DigestArgument = Annotated[str, typer.Argument(help="Leading hex digits of the profile's digest.")]
FilesArgument = Annotated[list[Path] | None, typer.Argument(help="Profiles beside those that are installed.")]


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


def adding(url: str) -> AbstractContextManager[Tier]:
    """Open a store to add to it; a folder is made. ValueError for memory of this process, or if it does not answer."""
    if url.startswith("memory://"):
        raise ValueError("memory:// is gone when this command ends: give a store that engines open too")
    tier = open_tier(url, Limits(), SystemClock(), lambda key: False)
    return opened(tier, tier.open)


def names_of(folder: Path, fingerprint: str, tenant_salt: str, model: Any = None) -> list[bytes]:
    """Return a tenant's names of a model: by the fingerprint that its engines are given, or of the one in a folder.

    Those are by its weight files, and as transformers loads it in each dtype: weights differ, a profile is good for
    all. model: the folder's, if it is loaded already, in float32. ValueError if it has no weight files.
    """
    salt = option_bytes(tenant_salt)
    if fingerprint:
        return [profile_name(option_bytes(fingerprint), salt)]
    from kvtide.engines.paged import files_fingerprint
    from kvtide.engines.transformers import fingerprint_in, load_model, model_fingerprint

    found, model = [files_fingerprint(folder, {})], model or load_model(folder)
    found.append(model_fingerprint(model))
    for dtype in ("bfloat16", "float16"):
        found.append(fingerprint_in(model, dtype) or model_fingerprint(load_model(folder, dtype)))
    return [profile_name(each, salt) for each in found]


def store_profile(tier: Tier, profile: Profile, names: Sequence[bytes]) -> None:
    """Make a profile the newest of the models of these names."""
    ProfileStore(tier).put(profile, names, SystemClock().wall_s())


@app.command()
def put(
    file: Annotated[Path, typer.Argument(help="A profile, as `kvtide calibrate --output` writes it.")],
    model: Annotated[Path | None, typer.Option("--model", help="The folder of the model that it is of.")] = None,
    fingerprint: FingerprintOption = "",
    tenant_salt: SaltOption = "",
    url: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Put a profile into a store, as the newest of a model: engines take it within minutes."""
    if (model is None) == (not fingerprint):
        raise ValueError("say whose profile it is: --model FOLDER, or the --fingerprint that its engines are given")
    profile, names = read_profile(file), names_of(model or Path(), fingerprint, tenant_salt)
    with adding(url) as tier:
        store_profile(tier, profile, names)
    if as_json:
        emit_json({"store": url, "profile": profile.digest.hex(), "codec": profile.kind, "names": len(names)})
    else:
        CONSOLE.print(f"put {profile.kind} profile {profile.digest.hex()[:12]}")


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
    if as_json:
        emit_json({"store": url, "profile": found.digest.hex(), "file": str(output)})
    else:
        CONSOLE.print(f"{output}: {found.kind} profile {found.digest.hex()[:12]} of {escape(found.model)}")


@app.command()
def ls(
    files: FilesArgument = None,
    url: StoreOption = DEFAULT_STORE,
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """List the profiles that a store has and those that its blocks need: a block without its profile is a miss."""
    with looking_at(url) as tier:
        found, looked_into = _rows(tier, limit, files or [])
    if as_json:
        emit_json({"store": url, "looked_into": looked_into, "rows": found})
        return
    table = narrow_table("profile", "model", "codec", "here", ">size", ">blocks", ">stored")
    for each in found:
        here = ("newest" if each.is_newest else "yes") if each.found else "no"
        figures = (format_bytes(each.profile_bytes), str(each.objects), format_bytes(each.stored_bytes))
        table.add_row(each.profile[:12], escape(each.model), escape(each.codec), here, *figures)
    CONSOLE.print(table if found else f"no profiles, and none of {looked_into} blocks needs one")
    if any(not each.found for each in found):
        CONSOLE.print("What is not here is a miss: kvtide profile put FILE --model FOLDER")


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
            rows[row.profile] = msgspec.structs.replace(
                so_far, objects=so_far.objects + 1, stored_bytes=so_far.stored_bytes + row.stored_bytes
            )
    # One that was removed and that nothing needs is over.
    kept = [rows[digest] for digest in sorted(rows) if rows[digest].found or rows[digest].objects]
    return kept, len(objects)


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
    if as_json:
        emit_json({"store": url, "profile": chosen.hex(), "names": models, "objects": needed})
    else:
        CONSOLE.print(f"removed {chosen.hex()[:12]}; {needed} of {looked_into} objects needed it")


def _chosen(store: ProfileStore, digits: str) -> bytes:
    """Return the digest of the one profile that begins so. ValueError for none or several."""
    found = {each.digest for each in store.all() if each.digest.startswith(digits.lower())}
    if len(found) != 1:
        raise ValueError(f"{len(found)} profiles of the store begin with {digits!r}: see `kvtide profile ls`")
    return bytes.fromhex(found.pop())
