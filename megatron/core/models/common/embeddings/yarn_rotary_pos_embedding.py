"""YaRN (Peng et al. 2023): rotary frequencies for sequences longer than those a model was trained on."""

import math

import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import Group


class YarnRotaryEmbedding(RotaryEmbedding):
    """Angles as RotaryEmbedding's, with slow pairs of channels stretched by `scaling_factor`.

    A pair that turns more than beta_fast times over original_max_position_embeddings tokens keeps its frequency, one that turns less than
    beta_slow times has it divided by scaling_factor, and between the two the share goes linearly with the pair's number. Whoever applies
    the angles multiplies by `mscale` (see `concentration`).
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        use_cpu_initialization: bool = False,
        cp_group: Group = None,
    ) -> None:
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            use_cpu_initialization=use_cpu_initialization,
            cp_group=cp_group,
        )
        self.mscale = concentration(scaling_factor, mscale, mscale_all_dim)
        kept = kept_share(2 * len(self.inv_freq), rotary_base, original_max_position_embeddings, beta_fast, beta_slow)
        kept = kept.to(self.inv_freq)
        self.inv_freq = kept * self.inv_freq + (1 - kept) * self.inv_freq / scaling_factor


def kept_share(width: int, base: float, original_length: int, beta_fast: float, beta_slow: float) -> torch.Tensor:
    """[width / 2]: by pair of channels how much of its frequency stays, 1 for fast pairs, 0 for slow ones."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair_that_turns(beta_fast)), 0), min(math.ceil(pair_that_turns(beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
    return 1 - ramp.clamp(0.0, 1.0)


def yarn_get_mscale(scaling_factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1: how much longer sequences sharpen the softmax; 1 for a factor of at most 1."""
    return 1.0 if scaling_factor <= 1.0 else 0.1 * mscale * math.log(scaling_factor) + 1.0


def concentration(scaling_factor: float, mscale: float, mscale_all_dim: float) -> float:
    """What the turned channels are multiplied by. DeepSeek-V2 and V3 give `mscale_all_dim` for it to be in the softmax's scale instead, by
    which all channels of queries and keys get it."""
    return yarn_get_mscale(scaling_factor, mscale) / yarn_get_mscale(scaling_factor, mscale_all_dim)
