"""A digest of a model's weight files and settings. Reads every byte of them, once for each file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from kvtide.config import cache_home

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SPLIT_NAME = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")


def files_fingerprint(folder: Path, settings: Mapping[str, object]) -> bytes:
    """Return a digest of a folder's weight files, read again only once they change, and of settings.

    ValueError if there are no weight files.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"no weight files in {folder}: give the option `fingerprint`, which must change with the model"
        )
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True, default=str).encode())
    for file in files:
        digest.update(f"{file.name} {file_digest(file)}\n".encode())
    return digest.digest()


def gguf_files(path: Path) -> list[Path]:
    """Return the files of a GGUF model, which may be split. ValueError if one is missing."""
    split = _SPLIT_NAME.fullmatch(path.name)
    count = int(split[2]) if split else 1
    files = [path.with_name(f"{split[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)] if split else [path]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"no file {path.with_name(missing[0])}")
    return files


def gguf_fingerprint(path: Path) -> bytes:
    """Return a digest of all that is in a GGUF model's files, which are read again only once they change."""
    return hashlib.sha256("\n".join(map(file_digest, gguf_files(path))).encode()).digest()


def file_digest(file: Path) -> str:
    """Return the digest of a file's bytes, read again only once the file changes."""
    state = file.stat()
    # Archives and copies give files whatever mtime they like; the kernel alone says when one changed.
    name = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"
    note = cache_home() / "fingerprints" / hashlib.sha256(name.encode()).hexdigest()
    found = ""
    # What a crash left of a note is none, and one that can't be kept is made again.
    with suppress(OSError, UnicodeDecodeError):
        found = note.read_text(encoding="ascii")
    if _DIGEST.fullmatch(found):
        return found
    with file.open("rb") as source:
        found = hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        aside = note.with_name(f"{note.name}.{os.getpid()}")
        aside.write_text(found, encoding="ascii")
        aside.rename(note)
    return found
