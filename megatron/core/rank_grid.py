"""Pure rank arithmetic: which rank stands where on the named axes, and which ranks form a group. No torch, no processes.

Two factorizations of the same ranks share the pipeline axis: dense layers use tp, cp, dp, pp; experts use etp, ep, edp, pp.
In an order string such as "tp-cp-ep-dp-pp" the first axis varies fastest. An axis may split in two: `cp` into cp_0 (fastest), cp_1, ...
for hierarchical context parallelism, `dp` into dp_in and dp_out for several optimizer instances. A group may name the axis or a part of it.
"""

from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class RankGrid:
    """One factorization: (axis, size) pairs, the first axis varying fastest, and the axes that stand for several pairs."""

    axes: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, *names: str) -> int:
        """Number of ranks of a group over the axes `names`."""
        wanted = self._expand(names)
        return prod(size for axis, size in self.axes if axis in wanted)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index on each axis, and on each axis that was split."""
        indices, rest = {}, rank
        for axis, size in self.axes:
            indices[axis] = rest % size
            rest //= size
        for name, pieces in self.parts:
            stride, index = 1, 0
            for piece in pieces:
                index += indices[piece] * stride
                stride *= dict(self.axes)[piece]
            indices[name] = index
        return indices

    def groups(self, *names: str) -> list[list[int]]:
        """All groups over the axes `names`: ranks that differ in these axes alone, ascending; groups ordered by first rank."""
        wanted = self._expand(names)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            fixed = tuple(where[axis] for axis, _ in self.axes if axis not in wanted)
            members.setdefault(fixed, []).append(rank)
        return sorted(members.values())

    def group_of(self, rank: int, *names: str) -> list[int]:
        """The group over the axes `names` that `rank` is in, ascending. Cost: the group's size, not the world's."""
        wanted = self._expand(names)
        base, stride, offsets = rank, 1, [0]
        for axis, size in self.axes:
            if axis in wanted:
                base -= (rank // stride % size) * stride
                offsets = [offset + index * stride for index in range(size) for offset in offsets]
            stride *= size
        return sorted(base + offset for offset in offsets)

    def _expand(self, names: tuple[str, ...]) -> set[str]:
        split = dict(self.parts)
        known = {axis for axis, _ in self.axes} | set(split)
        assert set(names) <= known, f"axes {sorted(set(names) - known)} are not among {sorted(known)}"
        return {piece for name in names for piece in split.get(name, (name,))}


@dataclass(frozen=True)
class Layout:
    """Both factorizations of a world."""

    dense: RankGrid
    expert: RankGrid

    @property
    def world_size(self) -> int:
        return self.dense.world_size


def make_layout(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
    hierarchical_cp: tuple[int, ...] = (),
    optimizer_instances: int = 1,
) -> Layout:
    """Factorize `world_size` ranks. `etp` None means tp; dp and edp are what is left.

    Raises ValueError with every problem: sizes that do not divide, an unknown order, pipeline groups that would differ between the two.
    """
    etp = tp if etp is None else etp
    problems = layout_problems(world_size, tp, pp, cp, ep, etp, order, hierarchical_cp, optimizer_instances)
    if problems:
        raise ValueError("; ".join(problems))
    dp, edp = world_size // (tp * cp * pp), world_size // (etp * ep * pp)
    names = complete_order(order)
    dense_axes: list[tuple[str, int]] = []
    for name in names:
        if name == "cp" and hierarchical_cp:
            dense_axes += [(f"cp_{level}", size) for level, size in enumerate(hierarchical_cp)]
        elif name == "dp":
            dense_axes += [("dp_in", dp // optimizer_instances), ("dp_out", optimizer_instances)]
        elif name != "ep":
            dense_axes.append((name, {"tp": tp, "cp": cp, "pp": pp}[name]))
    expert_axes: list[tuple[str, int]] = []
    for name in names:
        if name == "dp":
            expert_axes += [("edp_in", edp // optimizer_instances), ("edp_out", optimizer_instances)]
        elif name != "cp":
            expert_axes.append({"tp": ("etp", etp), "ep": ("ep", ep), "pp": ("pp", pp)}[name])
    parts: list[tuple[str, tuple[str, ...]]] = [("dp", ("dp_in", "dp_out"))]
    if hierarchical_cp:
        parts.append(("cp", tuple(f"cp_{level}" for level in range(len(hierarchical_cp)))))
    layout = Layout(
        RankGrid(tuple(dense_axes), tuple(parts)),
        RankGrid(tuple(expert_axes), (("edp", ("edp_in", "edp_out")),)),
    )
    if layout.dense.group_of(0, "pp") != layout.expert.group_of(0, "pp"):
        raise ValueError(
            f"order {order} gives dense layers (tp {tp} x cp {cp}) and experts (etp {etp} x ep {ep}) different pipeline groups; "
            "put pp last (tp-cp-ep-dp-pp), or make tp x cp equal etp x ep"
        )
    return layout


def complete_order(order: str) -> list[str]:
    """The axes of `order`, those that it leaves out appended (they must have size 1)."""
    names = order.lower().split("-")
    return names + [axis for axis in AXES if axis not in names]


def layout_problems(
    world_size: int,
    tp: int,
    pp: int,
    cp: int,
    ep: int,
    etp: int,
    order: str,
    hierarchical_cp: tuple[int, ...] = (),
    optimizer_instances: int = 1,
) -> list[str]:
    """What is wrong with this factorization, in words; empty when it works."""
    sizes = {"tensor parallel": tp, "pipeline parallel": pp, "context parallel": cp, "expert parallel": ep, "expert tensor parallel": etp}
    problems = [f"{name} size {size} must be at least 1" for name, size in sizes.items() if size < 1]
    if problems:
        return problems
    named = order.lower().split("-")
    if set(named) - set(AXES) or len(set(named)) != len(named):
        return [f"order {order!r} must name each of {'-'.join(AXES)} at most once"]
    missing = [axis for axis, size in {"tp": tp, "cp": cp, "ep": ep, "pp": pp}.items() if size > 1 and axis not in named]
    if missing:
        problems.append(f"order {order!r} leaves out {', '.join(missing)}, which is larger than 1; use tp-cp-ep-dp-pp")
    for text, product in ((f"tp {tp} x cp {cp} x pp {pp}", tp * cp * pp), (f"expert tp {etp} x ep {ep} x pp {pp}", etp * ep * pp)):
        if world_size % product:
            problems.append(f"world size {world_size} is not divisible by {text} = {product}")
        elif world_size // product % optimizer_instances:
            problems.append(
                f"{world_size // product} data-parallel ranks (world size {world_size} / {text}) are not divisible by "
                f"{optimizer_instances} optimizer instances"
            )
    if hierarchical_cp and prod(hierarchical_cp) != cp:
        problems.append(f"hierarchical context parallel sizes {list(hierarchical_cp)} multiply to {prod(hierarchical_cp)}, not to cp {cp}")
    return problems
