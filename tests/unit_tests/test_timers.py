import re
import time

import pytest

from megatron.core.timers import Timers
from tests.distributed import run_on_ranks


def test_elapsed_active_and_levels():
    timers = Timers(log_level=1, log_option="minmax")
    timers("outer", log_level=0).start()
    timers("inner", log_level=2).start()  # above the level: nothing
    time.sleep(0.02)
    timers("inner").stop()
    timers("outer").stop()
    assert 0.02 <= timers("outer").active_time() < 1.0
    assert timers("inner").active_time() == 0.0
    first = timers("outer").elapsed(reset=True)
    assert first >= 0.02 and timers("outer").elapsed() == 0.0
    assert timers("outer").active_time() == first


def test_log_and_write(capsys):
    timers = Timers(log_level=2, log_option="max")
    timers("phase").start()
    timers("phase").stop()
    written = []

    class Writer:
        def add_scalar(self, *scalar):
            written.append(scalar)

    timers.write(["phase", "unknown"], Writer(), 3, reset=False)
    timers.log(normalizer=2.0)
    assert written[0][0] == "phase-time" and written[0][2] == 3 and len(written) == 1
    assert re.search(r"max time across ranks \(ms\):\n    phase \.+: \d+\.\d\d\n", capsys.readouterr().out)
    with pytest.raises(ValueError, match="minmax"):
        Timers(1, "mean")


def _minmax() -> str | None:
    import torch.distributed as dist

    timers = Timers(log_level=0, log_option="minmax")
    timers("wait", log_level=0).start()
    time.sleep(0.1 * dist.get_rank())
    timers("wait").stop()
    return timers.get_all_timers_string()


def test_minmax_over_ranks():
    texts = run_on_ranks(2, _minmax)
    low, high = (float(number) for number in re.findall(r"\((\d+\.\d+), (\d+\.\d+)\)", texts[0])[0])
    assert texts[0] == texts[1] and low < 50 and high >= 100
