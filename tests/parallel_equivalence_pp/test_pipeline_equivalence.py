"""A model over pipeline stages trains as in one process: float64, 1e-9 relative. Another layout is a line of LAYOUTS."""

from functools import cache

import pytest
import torch

from tests.distributed import run_on_ranks
from tests.parallel_equivalence_pp.layouts import MODELS, STEPS, Layout, Outcome, train, train_all

PER_TOKEN = {"calculate_per_token_loss": True}
LAYOUTS = {
    "pp2": Layout(2, pp=2),
    "pp2 vpp2": Layout(2, pp=2, vp=2),
    "pp2 vpp4": Layout(2, pp=2, vp=4),
    "pp2 per token": Layout(2, pp=2, config=PER_TOKEN),
    "pp2 zero-bubble": Layout(2, pp=2, config={"pipeline_schedule": "zero-bubble"}),
    "pp2 uneven": Layout(2, pp=2, config={"num_layers_in_first_pipeline_stage": 3}),
    "pp2 vpp2 uneven": Layout(2, pp=2, vp=2, config={"num_layers_in_last_pipeline_stage": 2}),
    "pp4": Layout(4, pp=4),
    "pp4 vpp2": Layout(4, pp=4, vp=2),
    "pp4 zero-bubble": Layout(4, pp=4, config={"pipeline_schedule": "zero-bubble"}),
    "pp4 ends": Layout(4, pp=4, config={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}),
    "pp2 dp2": Layout(4, pp=2),
    "pp2 dp2 per token": Layout(4, pp=2, config=PER_TOKEN),
    "pp2 vpp2 dp2 overlap": Layout(4, pp=2, vp=2, overlap=True),
    "pp2 dp2 overlap zero-bubble": Layout(4, pp=2, overlap=True, config={"pipeline_schedule": "zero-bubble"}),
}


@cache
def reference(kind: str, per_token: bool) -> Outcome:
    return train(kind, Layout(config=PER_TOKEN if per_token else {}))


@cache
def outcomes(world: int) -> dict[tuple[str, str], list[Outcome]]:
    """All layouts of `world` processes: (model, name) -> what each rank saw."""
    names = [(kind, name) for name, layout in LAYOUTS.items() for kind in MODELS if layout.world == world]
    ranks = run_on_ranks(world, train_all, [(kind, LAYOUTS[name]) for kind, name in names])
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(names)}


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    scale = float(expected.abs().max()) or 1.0
    assert float((actual - expected).abs().max()) <= 1e-9 * scale, what


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pipeline_trains_as_one_process(name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    found = outcomes(layout.world)[kind, name]
    expected = reference(kind, bool(layout.config.get("calculate_per_token_loss")))
    for outcome in found:
        for key, value in outcome.initial.items():
            assert torch.equal(value, expected.initial[key]), f"initial {key}"
        for key, value in outcome.gradients.items():
            same(value, expected.gradients[key], f"gradient of {key}")
        for key, value in outcome.final.items():
            same(value, expected.final[key], f"{key} after {STEPS} steps")
        same(torch.tensor(outcome.norms), torch.tensor(expected.norms), "gradient norms")
    assert set().union(*(outcome.gradients for outcome in found)) == set(expected.gradients)
    with_loss = [outcome for outcome in found if outcome.losses]
    assert len(with_loss) == layout.world // layout.pp
    same(torch.stack([torch.stack(outcome.losses) for outcome in with_loss]).sum(0), torch.stack(expected.losses), "losses")
    evaluations = [outcome.evaluation for outcome in with_loss if outcome.evaluation is not None]
    assert expected.evaluation is not None and len(evaluations) == len(with_loss)
    same(torch.stack(evaluations).sum(0), expected.evaluation, "loss of the evaluation")


def test_both_copies_of_a_tied_weight_stay_equal() -> None:
    key = ("embedding.word_embeddings.weight", None)
    for name, layout in LAYOUTS.items():
        copies = [outcome.final[key] for outcome in outcomes(layout.world)["gpt", name] if key in outcome.final]
        assert len(copies) == 2 * layout.world // layout.pp
        assert all(torch.equal(copy, copies[0]) for copy in copies)
