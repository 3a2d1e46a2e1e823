"""Corpora in object storage: the pair's files are copied into a local folder once, and read there.

A prefix with a scheme (s3://bucket/corpus, gs://, memory://, whatever fsspec knows) is such a corpus. The copies lie at
`<cache>/<scheme>/<path>.bin|.idx`, each beside a `.source.json` that says which version of the object it is. Torch-free.
"""

import json
import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any

from megatron.core.optional_imports import require

logger = logging.getLogger(__name__)
BLOCK = 16 << 20  # bytes
SUFFIXES = (".idx", ".bin")


def is_remote(prefix: str | None) -> bool:
    """Whether a corpus' prefix is a URL."""
    return prefix is not None and re.match(r"[a-z][a-z0-9+.-]*://", prefix) is not None


def local_prefix(prefix: str, cache: str | None) -> str:
    """The prefix of a local copy of the corpus, which is made where it is missing or of another version.

    cache  local folder (--object-storage-cache-path)

    Raises ValueError naming the object that is not there or cannot be read; a copy is never left half-written under its name. Storage that
    cannot be reached costs a warning where there is a copy already.
    """
    if cache is None:
        raise ValueError(f"{prefix} lies in object storage: give --object-storage-cache-path a local folder for its copy")
    fsspec = require("fsspec", f"reading {prefix}")
    scheme, _, path = prefix.partition("://")
    target = os.path.join(cache, scheme, path.strip("/"))
    for suffix in SUFFIXES:
        _fetch(fsspec, prefix + suffix, Path(target + suffix))
    return target


def _fetch(fsspec: Any, url: str, target: Path) -> None:
    note = target.with_name(target.name + ".source.json")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        version = _version(filesystem, path)
    except FileNotFoundError:
        raise ValueError(f"{url}: no such object; --data-path takes the common prefix of a .bin/.idx pair, without the suffix") from None
    except (OSError, ValueError, ImportError) as error:
        if target.is_file() and note.is_file():
            logger.warning("%s cannot be reached (%s): the copy %s is used", url, error, target)
            return
        raise ValueError(f"{url} cannot be read: {error}") from None
    if target.is_file() and target.stat().st_size == version["size"] and _noted(note) == version:
        return
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filesystem.open(path, "rb") as source, open(temporary, "wb") as copy:
            while block := source.read(BLOCK):
                copy.write(block)
        if temporary.stat().st_size != version["size"]:
            raise ValueError(f"{url}: {temporary.stat().st_size} bytes came, it has {version['size']}")
        note.unlink(missing_ok=True)
        os.replace(temporary, target)
        note.write_text(json.dumps(version))
    except OSError as error:
        raise ValueError(f"{url} cannot be copied to {target}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _noted(note: Path) -> Any:
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError):
        return None


def _version(filesystem: Any, path: str) -> dict[str, Any]:
    """What changes when the object does, as far as its storage tells."""
    info = filesystem.info(path)
    stamps = {name: str(info[name]) for name in ("ETag", "etag", "md5Hash", "generation", "mtime", "created") if info.get(name) is not None}
    return {"size": int(info["size"]), **stamps}
