"""Sliding windows, and which masks a backend's kernels know: what may be asked for. No torch."""

from collections.abc import Iterator, Sequence

from megatron.core.broken_rule import BrokenRule


def is_window_layer(window_size: Sequence[int] | None, skip_freq: int | Sequence[int] | None, layer_number: int) -> bool:
    """Whether the layer, counted from 1, looks through the window.

    skip_freq N: every Nth layer sees everything; a list: 1 for a layer with the window, 0 for one without.
    """
    if window_size is None:
        return False
    if skip_freq is None:
        return True
    return layer_number % skip_freq != 0 if isinstance(skip_freq, int) else bool(skip_freq[layer_number - 1])


def window_problems(
    window_size: Sequence[int] | None, skip_freq: int | Sequence[int] | None, num_layers: int | None
) -> Iterator[BrokenRule]:
    """What is wrong with a sliding window."""
    if window_size is None:
        if skip_freq is not None:
            yield BrokenRule("window_attn_skip_freq", "needs a window_size")
        return
    if len(window_size) != 2 or any(side < -1 for side in window_size):
        yield BrokenRule("window_size", "is two numbers, keys before and keys after a query, each at least -1 (all)", (128, 0))
    if isinstance(skip_freq, int):
        if skip_freq < 1:
            yield BrokenRule("window_attn_skip_freq", "must be at least 1", 4)
    elif skip_freq is not None and ((num_layers and len(skip_freq) != num_layers) or any(n not in (0, 1) for n in skip_freq)):
        yield BrokenRule("window_attn_skip_freq", f"as a list has one 0 or 1 for each of the {num_layers} layers", 4)


def backend_problem(backend: str, *, window: bool, attention_mask: bool, windows: bool = False) -> str | None:
    """Why an attention backend cannot do what is asked of it on a GPU; None when it can.

    windows: flash has kernels with sliding windows here, which are FlashAttention-3's.
    """
    if backend == "flash" and ((window and not windows) or attention_mask):
        with_windows = ", without FlashAttention-3 on one context-parallel rank in half precision without dropout"
        what = "an attention mask, which is a tensor" if attention_mask else f"a sliding window, which is a tensor{with_windows}"
        return f"flash's kernels cannot honour {what}"
    return None
