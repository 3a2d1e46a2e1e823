"""Ids to the residual stream: token embedding, learned positions, dropout."""

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, empty_parameter
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.param_sharding import declare, replicated
from megatron.core.tensor_parallel.random import dropout_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import Group


class PositionEmbedding(torch.nn.Module):
    """A table [max_sequence_length, hidden_size] that every rank holds."""

    def __init__(self, config: TransformerConfig, max_sequence_length: int) -> None:
        super().__init__()
        sharding = replicated((max_sequence_length, config.hidden_size))
        self.weight = empty_parameter(sharding, config, 1)
        assert config.embedding_init_method is not None
        declare(self.weight, sharding, config.embedding_init_method)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rows = len(self.weight)
        if positions.device.type == "cpu" and positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < rows:
            raise ValueError(
                f"positions up to {int(positions.max())} but max_position_embeddings is {rows}; raise it or shorten the sequence"
            )
        return F.embedding(positions, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """forward: ids and positions [b, s] -> [s, b, h] ([s / tp, b, h] under sequence parallelism), after embedding dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: Group = None,
        pg_collection: ProcessGroupCollection | None = None,
        shared_with: str | None = None,
    ) -> None:
        super().__init__(config)
        if num_tokentypes:
            raise ValueError("LanguageModelEmbedding: num_tokentypes is not built yet; leave it at 0")
        groups = default_pg_collection(pg_collection)
        self.tp_group = groups.tp if tp_group is None else tp_group
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.scatter_to_sequence_parallel = config.sequence_parallel and scatter_to_sequence_parallel
        # The table can scatter its own sum only where nothing is added to it afterwards.
        self.reduce_scatter_embeddings = self.scatter_to_sequence_parallel and not self.add_position_embedding
        assert config.embedding_init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            config=config,
            pg_collection=groups,
            logical_size=config.logical_vocab_size,
            shared_with=shared_with,
        )
        if self.add_position_embedding:
            self.position_embeddings = PositionEmbedding(config, max_sequence_length)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, tokentype_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if tokentype_ids is not None:
            raise ValueError("LanguageModelEmbedding: tokentype_ids is not built yet; leave it out")
        embeddings = self.word_embeddings(input_ids.t())  # looked up in [s, b], so that no activation is transposed
        if self.add_position_embedding:
            assert position_ids is not None, "learned positions need position_ids"
            embeddings = embeddings + self.position_embeddings(position_ids.t())
        if self.scatter_to_sequence_parallel and not self.reduce_scatter_embeddings:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self.tp_group)
        dropout = self.config.hidden_dropout if self.training else 0.0
        if not dropout:
            return embeddings
        with dropout_state(self.config, dropout):
            return F.dropout(embeddings, p=dropout)
