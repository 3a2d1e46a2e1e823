"""Pretrain a LLaMA: `pretrain_gpt.py` with that family's shape as defaults, each of which its flag overrides.

RMSNorm, SwiGLU, rotary positions, no biases, an output layer of its own, no dropout. Grouped queries: --group-query-attention
--num-query-groups N.
"""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider

LLAMA_DEFAULTS = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}

if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults=dict(LLAMA_DEFAULTS)
    )
