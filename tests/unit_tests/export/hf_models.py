"""Tiny random models of each family, as transformers makes and saves them, and what our model computes from their checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.training.arguments import apply_checkpoint_args, core_transformer_config_from_args, parse_args

os.environ["HF_HUB_OFFLINE"] = "1"
VOCAB = 100
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
QWEN_MOE = {**MOE, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
GROUPS = {"n_group": 4, "topk_group": 1}
V3_ALONE = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "tie_word_embeddings": True}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
# name -> (config class, its settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", BASE),
    "llama2_all_heads": ("LlamaConfig", {**BASE, "num_key_value_heads": 4, "rope_parameters": LINEAR_ROPE}),
    "llama3": ("LlamaConfig", {**BASE, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    "llama_biases": ("LlamaConfig", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**BASE, "sliding_window": None, "num_key_value_heads": 1}),
    "mistral_window": ("MistralConfig", {**BASE, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", {**BASE, "tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2Config", {**BASE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 16}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2_untied": ("GPT2Config", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40}),
    "mixtral": ("MixtralConfig", {**BASE, **MOE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**BASE, **QWEN_MOE, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2Config", {**BASE, **DEEPSEEK, "q_lora_rank": 12, "rope_parameters": YARN}),
    "deepseek_v2_lite": ("DeepseekV2Config", {**BASE, **DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek_v2_groups": ("DeepseekV2Config", {**BASE, **DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy", "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3Config", {**BASE, **DEEPSEEK, **GROUPS, "q_lora_rank": 12, "rope_parameters": YARN}),
    "deepseek_v3_experts": ("DeepseekV3Config", {**BASE, **DEEPSEEK, **V3_ALONE}),
    "deepseek_v3_dense": ("DeepseekV3Config", {**BASE, **DEEPSEEK, "first_k_dense_replace": 3, "q_lora_rank": None}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**BASE, **QWEN_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 56}),
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Save the model to `folder` and return it. Weights are large, biases and norms random, so that each of them counts in the logits."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    kind, base = MODELS[name]
    config = getattr(transformers, kind)(**base | settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            norm = "norm" in place or ".ln_" in place
            parameter.normal_(1.0 if norm and place.endswith("weight") else 0.0, 0.2)
        for place, buffer in model.named_buffers():
            if place.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


def tokens(vocab: int = VOCAB, length: int = 24) -> torch.Tensor:
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(3))


def build(checkpoint: Path, **layout: Any) -> GPTModel:
    """This rank's part of the checkpoint's model, as pretrain_gpt.py makes it with --use-checkpoint-args."""
    saved = vars(dist_checkpointing.load_common_state_dict(checkpoint)["args"])
    args = parse_args(argv=[])
    apply_checkpoint_args(args, saved)
    vars(args).update(hidden_dropout=0.0, attention_dropout=0.0, transformer_impl="local", pipeline_dtype=torch.float32, **layout)
    args.bias_gelu_fusion = saved["bias_gelu_fusion"]
    config = core_transformer_config_from_args(args)
    config.logical_vocab_size = args.vocab_size
    stage, stages = 0, layout.get("pipeline_model_parallel_size", 1)
    if stages > 1:
        stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=stage),
        vocab_size_with_padding(args.vocab_size, 128, layout.get("tensor_model_parallel_size", 1)),
        args.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    ).eval()
    dist_checkpointing.load(model.sharded_state_dict(), checkpoint)
    return model


@torch.no_grad()
def logits(checkpoint: Path, ids: torch.Tensor, **layout: Any) -> torch.Tensor | None:
    """[b, s, padded vocabulary] of the whole model, on the ranks that are there; None but on the last pipeline stage."""
    if dist.is_initialized():
        parallel_state.initialize_model_parallel(
            layout.get("tensor_model_parallel_size", 1),
            layout.get("pipeline_model_parallel_size", 1),
            expert_model_parallel_size=layout.get("expert_model_parallel_size", 1),
        )
    model = build(checkpoint, **layout)
    if not model.pre_process:
        hidden = torch.empty(ids.shape[1], ids.shape[0], model.config.hidden_size)
        dist.recv(hidden, src=dist.get_rank() - 1)
        model.set_input_tensor(hidden)
    output = model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    if not model.post_process:
        dist.send(output, dst=dist.get_rank() + 1)
        return None
    return output
