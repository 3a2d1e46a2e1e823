"""What every language model does with its embedding and its logits."""

import torch

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """Base class; subclasses set pre_process, post_process, share_embeddings_and_output_weights, embedding and output_layer."""

    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.pg_collection = default_pg_collection(pg_collection)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Loss per token [b, s] in fp32 from labels [b, s] and logits [s, b, vocabulary / tp], which the backward overwrites."""
        # Padding rows of the vocabulary take part in the softmax, as in Megatron-LM: its checkpoints go on with the same loss.
        # All but those of softmax_vocab_size, whose number depends on the layout.
        loss = vocab_parallel_cross_entropy(
            logits, labels.t(), tp_group=self.pg_collection.tp, num_valid=self.config.softmax_vocab_size, consume_logits=True
        )
        return loss.t().contiguous()  # scripts flatten it by view

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight that embedding and output layer share, as this stage holds it; None where they share none or it holds neither."""
        if not self.share_embeddings_and_output_weights:
            return None
        if self.pre_process:
            return self.embedding.word_embeddings.weight  # type: ignore[union-attr,return-value]
        if self.post_process:
            return self.output_layer.weight  # type: ignore[union-attr,return-value]
        return None
