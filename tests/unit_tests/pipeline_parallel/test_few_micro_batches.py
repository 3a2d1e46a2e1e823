"""Pipelines with few micro batches, also fewer than stages, end, and train as one process does."""

import torch

from tests.distributed import run_on_ranks
from tests.parallel_equivalence_pp import layouts
from tests.parallel_equivalence_pp.layouts import Layout, Outcome

SETTINGS = {
    4: [(Layout(4, pp=4), 1), (Layout(4, pp=4), 2), (Layout(4, pp=4, config={"pipeline_schedule": "zero-bubble"}), 3)],
    2: [(Layout(2, pp=2, vp=2), 2), (Layout(2, pp=2, vp=2), 4), (Layout(2, pp=2), 1)],
}


def train_with(settings: list[tuple[Layout, int]]) -> list[Outcome]:
    outcomes = []
    for layout, microbatches in settings:
        layouts.MICROBATCHES = microbatches
        outcomes.append(layouts.train("llama", layout))
    return outcomes


def test_few_micro_batches_train_as_in_one_process():
    alone = dict(zip((1, 2, 3, 4), run_on_ranks(1, train_with, [(Layout(), number) for number in (1, 2, 3, 4)])[0]))
    for world, settings in SETTINGS.items():
        ranks = run_on_ranks(world, train_with, settings)
        for index, (_, microbatches) in enumerate(settings):
            expected = alone[microbatches]
            (losses,) = [rank[index].losses for rank in ranks if rank[index].losses]
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses), rtol=1e-9, atol=0)
            for rank in ranks:
                for key, value in rank[index].final.items():
                    torch.testing.assert_close(value, expected.final[key], rtol=1e-9, atol=1e-12)
