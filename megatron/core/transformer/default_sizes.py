"""Sizes of a transformer that follow from others where they are not given. Torch-free."""


def default_ffn_hidden_size(hidden_size: int, gated: bool) -> int:
    """4 * hidden_size. A gated MLP has three matrices instead of two: 8/3 * hidden_size, rounded down to a multiple of 64, at least 64."""
    return max(64, hidden_size * 8 // 3 // 64 * 64) if gated else 4 * hidden_size


def default_kv_channels(hidden_size: int, num_attention_heads: int) -> int | None:
    """hidden_size / num_attention_heads, or None where that is not whole."""
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        return None
    return hidden_size // num_attention_heads
