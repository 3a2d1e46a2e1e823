"""Which sample of which corpus a global sample number is, over all restarts of a run. Pure arithmetic: numpy alone, no files.

Training walks over one line of global sample numbers 0, 1, 2, ... A plan cuts that line into segments. Within a segment the corpora and
their weights stay: its sample j comes from the corpus with the largest `weight * max(j, 1) - drawn` (helpers.build_blending_indices).
That rule never looks ahead, so a segment has no length: asking for more samples only continues it. Each corpus is a stream of its own,
of which a segment reads on from where the last one stopped:

    line      |  segment 0: A 0.7, B 0.3      |  segment 1: A 0.5, B 0.4, C 0.1   ...
    A         0 1 2 ...                     a | a+1 ...            none of A is read twice or left out
    B         0 1 ...                       b | b+1 ...
    C                                         | 0 1 ...

A stream begins with the samples of Megatron-LM's dataset for the number asked when the corpus came in (`asked`: whole epochs, shuffled as
the helpers say), and goes on with epochs that are shuffled on their own. `asked` is kept, whatever is asked for later: another number
would give another order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.utils import normalize

SAME_WEIGHT = 1e-9  # weights closer than this are the same, given as 7 3 or as 0.7 0.3


@dataclass(frozen=True)
class Member:
    """A corpus of the plan. `identity` tells it from others, also where its files have moved; `asked`: samples, None for one epoch."""

    name: str
    identity: str
    asked: int | None


@dataclass(frozen=True)
class Segment:
    """A stretch of the line, from global sample `start` on.

    members   numbers of its corpora in the plan
    weights   one each, their sum is 1
    consumed  samples of each of the plan's corpora, also of those that it does not read, that were read before `start`
    by_size   the weights are the corpora's sizes, none were given
    """

    start: int
    members: tuple[int, ...]
    weights: tuple[float, ...]
    consumed: tuple[int, ...]
    by_size: bool = False


@dataclass(frozen=True)
class SamplePlan:
    """`size`: samples of the line that were asked for at the first start."""

    size: int
    members: tuple[Member, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def first(cls, size: int, members: Sequence[Member], weights: Sequence[float], by_size: bool = False) -> "SamplePlan":
        """The plan of a run's first start. The weights are used as they are, to the last bit: their sum must be 1."""
        assert abs(sum(weights) - 1) < SAME_WEIGHT
        segment = Segment(0, tuple(range(len(members))), tuple(weights), (0,) * len(members), by_size)
        return cls(size, tuple(members), (segment,))

    @property
    def current(self) -> Segment:
        return self.segments[-1]

    def draws(self, segment: Segment, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the first `count` samples of a segment: which of its members (int16 [count]), how many it gave before (int64 [count])."""
        if len(segment.members) == 1:
            return np.zeros(count, dtype=np.int16), np.arange(count, dtype=np.int64)
        return build_blending_indices(np.array(segment.weights), count)

    def segment_of(self, number: int) -> int:
        """The segment that global sample `number` lies in."""
        return next(i for i in reversed(range(len(self.segments))) if self.segments[i].start <= number)

    def locate(self, number: int) -> tuple[int, int]:
        """(corpus, sample in its stream) of a global sample number. Slow: it works out the whole segment up to there."""
        segment = self.segments[self.segment_of(number)]
        picks, numbers = self.draws(segment, number - segment.start + 1)
        pick = int(picks[-1])
        member = segment.members[pick]
        return member, segment.consumed[member] + int(numbers[-1])

    def consumed_at(self, position: int, picks: np.ndarray | None = None) -> list[int]:
        """Samples of each corpus among the global samples 0 to `position` - 1, which reach into the current segment.

        picks  what the current segment draws, where it is known
        """
        segment = self.current
        count = position - segment.start
        assert count >= 0, f"position {position} is before the current segment, which starts at {segment.start}"
        if len(segment.members) == 1:
            drawn = [count]
        else:
            picks = self.draws(segment, count)[0] if picks is None else picks[:count]
            drawn = np.bincount(picks, minlength=len(segment.members)).tolist()
        consumed = list(segment.consumed)
        for member, more in zip(segment.members, drawn):
            consumed[member] += more
        return consumed

    def has_blend(self, identities: Sequence[str], weights: Sequence[float] | None) -> bool:
        """Whether the current segment reads these corpora with these weights (None: by their sizes)."""
        segment = self.current
        if [self.members[member].identity for member in segment.members] != list(identities):
            return False
        if weights is None or segment.by_size:
            return (weights is None) == (segment.by_size or len(segment.members) == 1)
        return all(abs(new - old) < SAME_WEIGHT for new, old in zip(normalize(weights), segment.weights))

    def continued(
        self, position: int, consumed: Sequence[int], corpora: Sequence[Member], weights: Sequence[float], by_size: bool = False
    ) -> "SamplePlan":
        """The plan that reads `corpora` with `weights` from global sample `position` on.

        consumed  samples of each of this plan's corpora that were read before
        corpora   those that the plan knows by their identity keep their place and what was asked of them; the others begin at sample 0
        """
        assert position >= self.current.start
        members = list(self.members)
        places = {member.identity: place for place, member in enumerate(members)}
        chosen = []
        for corpus in corpora:
            place = places.get(corpus.identity)
            if place is None:
                place = len(members)
                members.append(corpus)
            else:
                members[place] = replace(members[place], name=corpus.name)
            chosen.append(place)
        before = tuple(consumed) + (0,) * (len(members) - len(consumed))
        segment = Segment(position, tuple(chosen), tuple(normalize(weights)), before, by_size)
        return replace(self, members=tuple(members), segments=(*self.segments, segment))

    def state_dict(self, position: int, picks: np.ndarray | None = None) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts: the plan, and where a run stands in it."""
        return {
            "size": self.size,
            "members": [asdict(member) for member in self.members],
            "segments": [{name: _plain(value) for name, value in asdict(segment).items()} for segment in self.segments],
            "position": position,
            "consumed": self.consumed_at(position, picks),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "SamplePlan":
        members = tuple(Member(**member) for member in state["members"])
        segments = tuple(
            Segment(s["start"], tuple(s["members"]), tuple(s["weights"]), tuple(s["consumed"]), s["by_size"]) for s in state["segments"]
        )
        return cls(int(state["size"]), members, segments)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def place_in_stream(number: int, first: int, per_epoch: int) -> tuple[int, int]:
    """Sample `number` of a corpus as (0, its number among the `first` ones) or (epoch from 1 on, its number in that epoch)."""
    if number < first:
        return 0, number
    epoch, index = divmod(number - first, per_epoch)
    return epoch + 1, index
