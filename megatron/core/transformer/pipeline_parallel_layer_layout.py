"""Pipeline layouts as text: which stage holds the embedding, which layers and the loss. No torch in here.

    E embedding · t decoder layer · m layer for multi-token prediction (in the last stage) · L loss
     | next stage · (...) a group · *n the item or group before, n times · commas mean nothing
    "Et*3|(tt|)*4L" is  E t t t | t t | t t | t t | t t | L

Stages are listed in the order of the model. With several chunks a rank they go round the ranks: stage i is chunk i // ranks of rank
i % ranks. Source: the arguments of Megatron-LM's --pipeline-model-parallel-layout.
"""

from collections.abc import Sequence
from functools import lru_cache

NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
EXAMPLE = "such as 'Et|tt|tL'"


def parse_pipeline_layout(text: str) -> list[str]:
    """The stages of a layout, each as its letters: "Et*2|L" -> ["Ett", "L"]. Raises ValueError saying at which character it is wrong."""
    expanded, end = _sequence(text, 0, 0)
    assert end == len(text)
    return expanded.split("|")


def _sequence(text: str, start: int, depth: int) -> tuple[str, int]:
    """What stands from `start` to the end, or to the parenthesis that closes this group, written out; and where that is."""
    done, item, at = "", "", start  # `item` may still be repeated
    while at < len(text):
        letter = text[at]
        if letter in NAMES or letter == "|":
            done, item, at = done + item, letter, at + 1
        elif letter == "(":
            done, (item, end) = done + item, _sequence(text, at + 1, depth + 1)
            if end == len(text):
                raise _problem(text, at, "a parenthesis is not closed")
            at = end + 1
        elif letter == ")":
            if depth == 0:
                raise _problem(text, at, "a parenthesis was not opened")
            return done + item, at
        elif letter == "*":
            end = at + 1
            while end < len(text) and text[end].isdigit():
                end += 1
            times = int(text[at + 1 : end] or 0)
            if not item or times < 1:
                raise _problem(text, at, "* stands between what is repeated and a number from 1")
            done, item, at = done + item * times, "", end
        elif letter in ", ":
            at += 1
        else:
            raise _problem(text, at, f"{letter!r} means nothing; letters are E, t, m, L, |, parentheses and *n")
    return done + item, at


def _problem(text: str, at: int, rule: str) -> ValueError:
    return ValueError(f"pipeline layout {text!r}: at character {at + 1} {rule}, {EXAMPLE}")


class PipelineParallelLayerLayout:
    """A checked layout. `layout`: text, or a list of stages, each a list of "embedding", "decoder" and "loss".

    Raises ValueError with the first thing that is wrong.
    """

    def __init__(self, layout: str | Sequence[Sequence[str]], pipeline_model_parallel_size: int) -> None:
        self.text = layout if isinstance(layout, str) else "|".join("".join(map(_letter, stage)) for stage in layout)
        self.stages = parse_pipeline_layout(self.text)
        self.pipeline_model_parallel_size = ranks = pipeline_model_parallel_size
        whole, stages = "".join(self.stages), self.stages
        if "m" in "".join(stages[:-1]) or "m" in stages[-1].rstrip("L").rstrip("m"):
            raise ValueError(
                f"pipeline layout {self.text!r}: m, multi-token prediction, must stand in the last stage, before L, as in 'Et|tmL'"
            )
        for number, stage in enumerate(stages):
            if not stage:
                raise ValueError(f"pipeline layout {self.text!r}: stage {number} of 0 .. {len(stages) - 1} is empty; is a | too many?")
        if len(stages) % ranks:
            raise ValueError(
                f"pipeline layout {self.text!r} has {len(stages)} stages: it must be a multiple of the {ranks} pipeline ranks, "
                f"{len(stages) // ranks * ranks or ranks} for example"
            )
        for letter, place, where in (("E", 0, "first"), ("L", -1, "last")):
            if whole.count(letter) != 1 or letter not in stages[place]:
                raise ValueError(
                    f"pipeline layout {self.text!r}: the {NAMES[letter]}, {letter}, must stand once, in the {where} stage, {EXAMPLE}"
                )
        if whole[0] != "E" or whole[-1] != "L":
            raise ValueError(f"pipeline layout {self.text!r}: E must come before and L after every layer, {EXAMPLE}")

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Chunks of each rank."""
        return len(self.stages) // self.pipeline_model_parallel_size

    @property
    def num_layers(self) -> int:
        return sum(stage.count("t") for stage in self.stages)

    def layers(self, pp_rank: int, vp_stage: int | None = None) -> range:
        """The layers, counted from 0, of a rank's chunk."""
        slot = (vp_stage or 0) * self.pipeline_model_parallel_size + pp_rank
        first = sum(stage.count("t") for stage in self.stages[:slot])
        return range(first, first + self.stages[slot].count("t"))


def _letter(name: str) -> str:
    letters = {long: short for short, long in NAMES.items()}
    if name not in letters:
        raise ValueError(f"pipeline layout: {name!r} must be one of {', '.join(letters)}")
    return letters[name]


@lru_cache(maxsize=16)
def _cached(text: str, ranks: int) -> PipelineParallelLayerLayout:
    return PipelineParallelLayerLayout(text, ranks)


def pipeline_layout(layout: "str | Sequence[Sequence[str]] | PipelineParallelLayerLayout", ranks: int) -> PipelineParallelLayerLayout:
    """`layout`, in whichever of its forms, over `ranks` pipeline ranks. Raises ValueError, see PipelineParallelLayerLayout."""
    if isinstance(layout, PipelineParallelLayerLayout):
        return _cached(layout.text, ranks)
    return _cached(layout, ranks) if isinstance(layout, str) else PipelineParallelLayerLayout(layout, ranks)


def layout_problems(
    layout: "str | Sequence[Sequence[str]] | PipelineParallelLayerLayout",
    ranks: int,
    chunks: int | None,
    layers: int | None,
    mtp_layers: int | None = None,
) -> list[str]:
    """What is wrong with a layout for `ranks` pipeline ranks of `chunks` chunks (None: not given) and a model of `layers` layers, and
    `mtp_layers` for multi-token prediction."""
    try:
        found = pipeline_layout(layout, ranks)
    except ValueError as error:
        return [str(error)]
    problems = []
    if layers is not None and found.num_layers != layers:
        problems.append(f"pipeline layout {found.text!r} has {found.num_layers} decoder layers, t: the model has {layers}")
    written = "".join(found.stages).count("m")
    if written != (mtp_layers or 0):
        problems.append(
            f"pipeline layout {found.text!r} has {written} layers for multi-token prediction, m: the model has {mtp_layers or 0}"
        )
    if chunks is not None and found.virtual_pipeline_model_parallel_size != chunks:
        problems.append(
            f"pipeline layout {found.text!r} has {len(found.stages)} stages, so {found.virtual_pipeline_model_parallel_size} chunks on "
            f"each of {ranks} pipeline ranks, not {chunks}"
        )
    return problems
