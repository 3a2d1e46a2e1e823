"""The table of process groups, and the collection that models, optimizers and schedules are given.

Each row of GROUPS says which ranks form the group: a factorization of rank_grid.py and the axes over which its members differ.
A new parallel axis is a row here. A group is None where there is one rank and no torch.distributed.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.rank_grid import Layout

# name -> (factorization, axes). Names as Megatron's users know them; intra_* and inter_*: within one optimizer instance and across them.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("dense", ("tp",)),
    "pp": ("dense", ("pp",)),
    "mp": ("dense", ("tp", "pp")),
    "cp": ("dense", ("cp",)),
    "tp_cp": ("dense", ("tp", "cp")),
    "dp": ("dense", ("dp",)),
    "dp_cp": ("dense", ("dp", "cp")),
    "tp_dp": ("dense", ("tp", "dp")),
    "tp_dp_cp": ("dense", ("tp", "dp", "cp")),
    "intra_dp": ("dense", ("dp_in",)),
    "intra_dp_cp": ("dense", ("dp_in", "cp")),
    "intra_dist_opt": ("dense", ("tp", "cp", "dp_in", "pp")),
    "inter_dist_opt": ("dense", ("dp_out",)),
    "ep": ("expert", ("ep",)),
    "expt_tp": ("expert", ("etp",)),
    "tp_ep": ("expert", ("etp", "ep")),
    "tp_ep_pp": ("expert", ("etp", "ep", "pp")),
    "expt_dp": ("expert", ("edp",)),
    "intra_expt_dp": ("expert", ("edp_in",)),
    "inter_expt_dp": ("expert", ("edp_out",)),
}
# Not a product of axes: ends of the pipeline, which share a tied embedding; and one group a level of hierarchical context parallelism.
SPECIAL_GROUPS = ("embd", "pos_embd", "hcp")


class ProcessGroupCollection:
    """The groups of one model as attributes (`tp`, `pp`, `cp`, `dp`, `dp_cp`, `ep`, ...); a group not given is None, "alone".

    `hcp` is a list of groups. Raises ValueError for a name that is not in the table.
    """

    tp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    mp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    dp_cp: dist.ProcessGroup | None
    tp_cp: dist.ProcessGroup | None
    tp_dp: dist.ProcessGroup | None
    tp_dp_cp: dist.ProcessGroup | None
    intra_dp: dist.ProcessGroup | None
    intra_dp_cp: dist.ProcessGroup | None
    intra_dist_opt: dist.ProcessGroup | None
    inter_dist_opt: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None
    expt_tp: dist.ProcessGroup | None
    tp_ep: dist.ProcessGroup | None
    tp_ep_pp: dist.ProcessGroup | None
    expt_dp: dist.ProcessGroup | None
    intra_expt_dp: dist.ProcessGroup | None
    inter_expt_dp: dist.ProcessGroup | None
    embd: dist.ProcessGroup | None
    pos_embd: dist.ProcessGroup | None
    hcp: list[dist.ProcessGroup] | None

    def __init__(self, **groups: Any) -> None:
        known = (*GROUPS, *SPECIAL_GROUPS)
        unknown = set(groups) - set(known)
        if unknown:
            raise ValueError(f"unknown process groups {sorted(unknown)}; the names are {', '.join(known)}")
        for name in known:
            setattr(self, name, groups.get(name))

    def __repr__(self) -> str:
        sizes = {name: group.size() for name in GROUPS if (group := getattr(self, name)) is not None}
        return f"ProcessGroupCollection({sizes})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Iterable[str] | None = None) -> "ProcessGroupCollection":
        """The groups that `parallel_state` holds; all alone when it was not initialized. `required_pgs`: only these names."""
        from megatron.core import parallel_state

        groups = parallel_state.all_groups()
        wanted = set(groups) if required_pgs is None else set(required_pgs)
        return cls(**{name: groups.get(name) for name in wanted})


def default_pg_collection(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """`pg_collection`, or the groups of `parallel_state` where none was given."""
    return ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection


def group_ranks(layout: Layout, name: str, rank: int) -> list[int]:
    """The ranks of the group `name` that `rank` is in."""
    factorization, axes = GROUPS[name]
    return getattr(layout, factorization).group_of(rank, *axes)


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The ends of a pipeline: where a tied embedding lives twice."""
    return pipeline_ranks[:1] if len(pipeline_ranks) == 1 else [pipeline_ranks[0], pipeline_ranks[-1]]


def create_groups(
    layout: Layout,
    rank: int,
    *,
    backend: str | None = None,
    timeout_minutes: float = 30,
    rank_offset: int = 0,
    embd_ranks: Any = None,
    pos_embd_ranks: Any = None,
) -> dict[str, Any]:
    """Create every group of the table that `rank` is in, with torch.distributed. Each rank creates only its own groups.

    All ranks must call it with the same layout: names go in the table's order, and equal lists of ranks share one communicator.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(ranks: list[int]) -> dist.ProcessGroup | None:
        if rank not in ranks:
            return None
        key = tuple(member + rank_offset for member in ranks)
        if key not in made:
            made[key] = dist.new_group(
                list(key), timeout=timedelta(minutes=timeout_minutes), backend=backend, use_local_synchronization=True
            )
        return made[key]

    groups: dict[str, Any] = {name: group(group_ranks(layout, name, rank)) for name in GROUPS}
    levels = [axis for axis, _ in layout.dense.axes if axis.startswith("cp_")]
    groups["hcp"] = [group(layout.dense.group_of(rank, level)) for level in levels] or None
    pipeline = group_ranks(layout, "pp", rank)
    groups["embd"] = group((embd_ranks or embedding_ranks)(pipeline))
    if groups["embd"] is None:
        # torch names a group by how many its members made before: a rank that left one out would wait for ever in the next it is in
        dist.new_group([rank + rank_offset], backend=backend, use_local_synchronization=True)
    group([rank])  # the same for pos_embd
    groups["pos_embd"] = group((pos_embd_ranks or (lambda ranks: ranks[:1]))(pipeline))
    return groups
