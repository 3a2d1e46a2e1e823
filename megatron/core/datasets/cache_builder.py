"""Which ranks fill the index caches: one for each folder that is really another one.

A cache folder may be shared by all nodes, or be a local disk of each. Nobody has to say which: the first rank of each host leaves a file
in it, and whoever sees the file of a lower rank leaves the building to that one.
"""

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)


def builds_here(folders: Sequence[str], needed: bool) -> bool:
    """Whether this rank builds, for itself and all that see the same folders. A collective over all ranks.

    folders  where this rank's caches lie; made if they are not there
    needed   whether this rank will read them at all

    A folder that cannot be written to has no builder: then every host counts as one, by its first rank.
    """
    rank = dist.get_rank()
    hosts = _gathered((uuid.uuid4().hex, (socket.gethostname(), tuple(map(os.path.abspath, folders))) if needed else None))
    run = hosts[0][0]
    first: dict[Any, int] = {}
    for other, (_, host) in enumerate(hosts):
        if host is not None:
            first.setdefault(host, other)
    candidates = sorted(first.values())
    mine = [_token(folder, run, rank) for folder in folders] if rank in candidates else []
    for path in mine:
        _touch(path)
    _gathered(None)  # every file is there
    builders = {next((other for other in candidates if _token(folder, run, other).exists()), rank) for folder in folders} if mine else set()
    builds = rank in builders
    everyone = _gathered(builds)  # every rank has looked
    for path in mine:
        path.unlink(missing_ok=True)
    if rank == 0 and sum(everyone) > 1:
        logger.info(
            "the index cache is another folder on %d hosts: ranks %s build", sum(everyone), [r for r, b in enumerate(everyone) if b]
        )
    return builds


def _token(folder: str, run: str, rank: int) -> Path:
    return Path(folder) / f".index-builder-{run}-{rank}"


def _touch(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        pass  # not writable: nobody will see it


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
