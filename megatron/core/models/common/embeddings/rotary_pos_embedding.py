"""Angles of the rotary position embedding (Su et al. 2021), and how they are applied."""

import math
from typing import Any

import torch

from megatron.core import device
from megatron.core.context_parallel.sequence_split import positions_in_documents, split_for_context_parallel
from megatron.core.fusions.fused_rope import apply_rotary_plain, fused_apply_rotary
from megatron.core.packed_seq_params import Document, PackedSeqParams, packed_documents
from megatron.core.utils import Group, get_pg_rank, get_pg_size


class RotaryEmbedding(torch.nn.Module):
    """forward(max_seq_len) -> angles [s, 1, 1, width] in radians, fp32, each twice; width = kv_channels * rotary_percent.

    max_seq_len is the whole sequence's; with several ranks in `cp_group` the angles are those of this rank's tokens, but all of them for a
    packed batch (packed_seq), of which `apply_rotary_pos_emb` looks them up.

    rotary_base: pair i turns by position * base^(-2i / width). seq_len_interpolation_factor: positions are divided by it
    (Chen et al. 2023). rope_scaling: the frequency-dependent stretching of Llama 3.1 by rope_scaling_factor.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group = None,
    ) -> None:
        super().__init__()
        self.cp_group = cp_group
        width = int(kv_channels * rotary_percent)
        if width < 2 or width % 2:
            raise ValueError(
                f"rotary width {width} (kv_channels {kv_channels} x rotary_percent {rotary_percent}) must be even and at least 2"
            )
        self.rotary_interleaved, self.seq_len_interpolation_factor = rotary_interleaved, seq_len_interpolation_factor
        where = torch.device("cpu") if use_cpu_initialization else device.current_device()
        frequencies = 1.0 / rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32, device=where) / width)
        self.inv_freq = stretch_frequencies(frequencies, rope_scaling_factor) if rope_scaling else frequencies
        self._cached: dict[tuple[int, int, int, int, torch.device], torch.Tensor] = {}
        self._read_by_graphs = dict(self._cached)  # of them, those that CUDA graphs go on reading

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """[s, width / 2]: position times frequency."""
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=self.inv_freq.device)
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        return torch.outer(positions, self.inv_freq)

    def get_cos_sin(self, max_seq_len: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return angles.cos(), angles.sin()

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Group = None) -> torch.Tensor:
        self.inv_freq = self.inv_freq.to(device.current_device())
        group = self.cp_group if cp_group is None else cp_group
        rank, size = (0, 1) if packed_seq else (get_pg_rank(group), get_pg_size(group))
        key = (max_seq_len, offset, rank, size, self.inv_freq.device)
        if key not in self._cached:
            with torch.inference_mode(False):  # an evaluation may come first; training cannot keep what inference mode makes
                angles = self.get_freqs_non_repeated(max_seq_len, offset)
                if self.rotary_interleaved:
                    repeated = angles.repeat_interleave(2, dim=-1)
                else:
                    repeated = torch.cat((angles, angles), dim=-1)
                repeated = split_for_context_parallel(repeated, 0, rank, size)[:, None, None, :]
            self._cached = {**self._read_by_graphs, key: repeated}
        if device.is_recording(self._cached[key]):
            self._read_by_graphs[key] = self._cached[key]
        return self._cached[key]

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor | None,
        transformer_config: Any,
        packed_seq_params: Any = None,
    ) -> int:
        """Tokens of the whole sequence, of which `transformer_input` [s, b, h] may hold a part; of the longest of a packed batch."""
        if packed_seq_params is not None:
            return max(document.padded for document in packed_documents(packed_seq_params))
        hidden = transformer.input_tensor if getattr(transformer, "input_tensor", None) is not None else transformer_input
        assert hidden is not None
        tensor_ranks = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        return hidden.shape[0] * tensor_ranks * transformer_config.context_parallel_size


def stretch_frequencies(
    frequencies: torch.Tensor, factor: float, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0, original_length: int = 8192
) -> torch.Tensor:
    """Llama 3.1: waves longer than original_length / low_freq_factor are stretched by `factor`, those shorter than
    original_length / high_freq_factor are kept, and between the two the share goes linearly with original_length / wave length."""
    waves = 2 * math.pi / frequencies
    kept = ((original_length / waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / factor


def packed_angles(freqs: torch.Tensor, documents: tuple[Document, ...], cp_group: Group = None) -> torch.Tensor:
    """Angles [longest, 1, 1, width] by position in a sequence -> [tokens, 1, 1, width] of this rank's tokens of a packed batch."""
    positions = positions_in_documents(documents, get_pg_rank(cp_group), get_pg_size(cp_group), freqs.device)
    return freqs.index_select(0, positions)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    config: Any,
    cu_seqlens: torch.Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Group = None,
    mla_rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Turn t [s, b, heads, d] by freqs [s, 1, 1, width <= d]: the fast path with config.apply_rope_fusion, else its plain twin.

    cu_seqlens: t [tokens, heads, d] is this rank's part of a packed batch; freqs are then those of its longest sequence, by position.
    mscale: what turns is multiplied by it. mla_rotary_interleaved: pairs are neighbouring channels, and stay in their places.
    """
    apply = fused_apply_rotary if config.apply_rope_fusion else apply_rotary_plain
    interleaved = config.rotary_interleaved or mla_rotary_interleaved
    if cu_seqlens is None:
        return apply(t, freqs, interleaved, mscale)
    angles = packed_angles(freqs, packed_documents(PackedSeqParams("thd", cu_seqlens, cu_seqlens)), cp_group)
    if t.dim() == 4:
        return apply(t, angles, interleaved, mscale)
    return apply(t.unsqueeze(1), angles, interleaved, mscale).squeeze(1)
