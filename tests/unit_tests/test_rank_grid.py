"""Rank grids against Megatron's published example and, for every small world, against the definition of a group."""

import itertools

import pytest

from megatron.core.process_groups_config import GROUPS, group_ranks
from megatron.core.rank_grid import layout_problems, make_layout


def test_published_example_of_16_gpus():
    """TP 2, PP 4, DP 2 on 16 ranks, the groups that Megatron-LM's documentation lists."""
    dense = make_layout(16, tp=2, pp=4).dense
    assert dense.groups("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert dense.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert dense.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert dense.groups("tp", "pp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_order_with_pipeline_before_data():
    dense = make_layout(16, tp=2, pp=4, order="tp-cp-ep-pp-dp").dense
    assert dense.groups("pp")[0] == [0, 2, 4, 6]
    assert dense.groups("dp")[0] == [0, 8]


def test_experts_on_the_same_ranks():
    layout = make_layout(8, tp=2, ep=4, etp=1)
    assert layout.expert.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.expert.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.dense.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_split_axes():
    dense = make_layout(16, cp=4, hierarchical_cp=(2, 2), optimizer_instances=2).dense
    assert dense.groups("cp")[0] == [0, 1, 2, 3]
    assert dense.groups("cp_0")[0] == [0, 1] and dense.groups("cp_1")[0] == [0, 2]
    assert dense.groups("dp")[0] == [0, 4, 8, 12]
    assert dense.groups("dp_in", "cp")[0] == list(range(8)) and dense.groups("dp_out")[0] == [0, 8]


def layouts(world_size):
    for tp, pp, cp, ep, etp in itertools.product(*[[size for size in (1, 2, 3, 4, 8) if world_size % size == 0]] * 5):
        for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
            if not layout_problems(world_size, tp, pp, cp, ep, etp, order) and (order.endswith("pp") or tp * cp == etp * ep):
                yield make_layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_group_of_every_layout(world_size):
    """Groups of one name partition the ranks; members differ in the group's axes alone; each rank finds the same list."""
    seen = 0
    for layout in layouts(world_size):
        seen += 1
        assert layout.dense.groups("pp") == layout.expert.groups("pp")
        for name, (factorization, axes) in GROUPS.items():
            grid = getattr(layout, factorization)
            groups = grid.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(world_size))
            for group in groups:
                assert group == sorted(group) and len(group) == grid.size(*axes)
                others = [axis for axis, _ in grid.axes if axis not in grid._expand(axes)]
                assert len({tuple(grid.coordinates(rank)[axis] for axis in others) for rank in group}) == 1
                assert all(group_ranks(layout, name, rank) == group for rank in group)
    assert seen > 0


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def expert_layouts(world_size):
    """Every factorization, with and without several optimizer instances, in both orders of ranks."""
    for tp, pp in itertools.product(divisors(world_size), repeat=2):
        if world_size % (tp * pp):
            continue
        stage = world_size // pp
        for cp, ep, etp in itertools.product(divisors(stage // tp), divisors(stage), divisors(stage)):
            for instances, order in ((1, "tp-cp-ep-dp-pp"), (2, "tp-cp-ep-dp-pp"), (2, "tp-cp-ep-pp-dp")):
                fits = stage % (ep * etp) == 0 and not (stage // (tp * cp) % instances or stage // (ep * etp) % instances)
                if fits and (order.endswith("pp") or pp == 1 or tp * cp == etp * ep):
                    yield make_layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order, optimizer_instances=instances)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_dense_and_expert_groups_fit_together(world_size):
    """What the reduction of gradients, norms and checkpoints take for granted of dense layers' and experts' groups."""
    seen = 0
    for layout in expert_layouts(world_size):
        seen += 1
        ranks = {name: set(group_ranks(layout, name, world_size - 1)) for name in GROUPS}
        assert ranks["pp"] == set(layout.expert.group_of(world_size - 1, "pp"))
        # a stage's ranks: those of a dense layer, and those of an expert
        stage = ranks["tp_dp_cp"]
        assert stage == set(layout.expert.group_of(world_size - 1, "etp", "ep", "edp")) and len(stage) * len(ranks["pp"]) == world_size
        assert ranks["expt_dp"] | ranks["tp_ep"] <= stage and len(ranks["expt_dp"]) * len(ranks["tp_ep"]) == len(stage)
        # once over the model: mp x dp_cp and tp_ep_pp x expt_dp are the world
        assert len(ranks["mp"]) * len(ranks["dp_cp"]) == len(ranks["tp_ep_pp"]) * len(ranks["expt_dp"]) == world_size
        assert len(ranks["mp"] & ranks["dp_cp"]) == len(ranks["tp_ep_pp"] & ranks["expt_dp"]) == 1
        # optimizer instances: dense parameters and experts are spread within the same set of ranks
        for within, across, whole in (("intra_dp_cp", "inter_dist_opt", "dp_cp"), ("intra_expt_dp", "inter_expt_dp", "expt_dp")):
            assert ranks[within] | ranks[across] <= ranks[whole] and len(ranks[within]) * len(ranks[across]) == len(ranks[whole])
        assert ranks["intra_expt_dp"] <= ranks["intra_dist_opt"] and ranks["inter_expt_dp"] == ranks["inter_dist_opt"]
    assert seen > 0


@pytest.mark.parametrize("world_size", [4, 8, 12])
def test_layouts_that_do_not_fit_are_refused(world_size):
    """All sizes that divide the world by themselves: each layout is made, or its problems are named."""
    made = refused = 0
    for tp, pp, cp, ep, etp in itertools.product(divisors(world_size), repeat=5):
        for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
            fits = world_size % (tp * cp * pp) == world_size % (etp * ep * pp) == 0
            same_pipelines = order.endswith("pp") or pp == 1 or tp * cp == etp * ep
            if fits and same_pipelines:
                make_layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
                made += 1
            else:
                with pytest.raises(ValueError, match="different pipeline groups" if fits else "not divisible"):
                    make_layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
                refused += 1
    assert made and refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 3, "tp": 2}, "world size 3 is not divisible by tp 2 x cp 1 x pp 1 = 2"),
        ({"world_size": 4, "ep": 3}, "world size 4 is not divisible by expert tp 1 x ep 3 x pp 1 = 3"),
        ({"world_size": 4, "tp": 0}, "tensor parallel size 0 must be at least 1"),
        ({"world_size": 4, "tp": 2, "order": "cp-dp-pp"}, "leaves out tp"),
        ({"world_size": 4, "order": "tp-dp-xx"}, "must name each of"),
        ({"world_size": 4, "cp": 4, "hierarchical_cp": (2, 4)}, "multiply to 8, not to cp 4"),
        ({"world_size": 4, "optimizer_instances": 3}, "not divisible by 3 optimizer instances"),
        ({"world_size": 8, "tp": 2, "pp": 2, "ep": 4, "etp": 1, "order": "tp-cp-ep-pp-dp"}, "different pipeline groups"),
    ],
)
def test_refusals_say_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_layout(**arguments)
