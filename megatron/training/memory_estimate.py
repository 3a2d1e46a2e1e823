"""A rough count of a process's memory, from its command line: for `--check-config`, and to see how many layers fit. No torch.

It counts tensors that grow with the model, of the fullest pipeline stage. Not counted: buffers of collectives, workspaces, fragmentation.
"""

import argparse

from megatron.core.flops import LatentSizes
from megatron.core.transformer.moe.settings import moe_layer_pattern
from megatron.training.model_size import embedding_parameters, padded_vocab_size, parameters_of_layers


def memory_bytes(args: argparse.Namespace) -> int:
    """All that is counted here."""
    return state_bytes(args) + activation_bytes(args)


def state_bytes(args: argparse.Namespace) -> int:
    """Weights, gradients and optimizer state."""
    dense, experts = _parameters_held(args)
    rest = _outside_layers(args)
    half = args.bf16 or args.fp16
    gradients = 4 if args.accumulate_allreduce_grads_in_fp32 or not half else 2
    of_model = (2 if half else 4) + gradients
    of_optimizer = (4 if half else 0) + (8 if args.optimizer == "adam" else 4 if args.sgd_momentum else 0)
    quantized = 2 * (dense + experts) if args.fp8 else 0  # both ways
    dense_ranks, expert_ranks = _ranks_that_share_optimizer_state(args)
    state = of_optimizer * (dense + rest) // dense_ranks + of_optimizer * experts // expert_ranks
    return of_model * (dense + rest + experts) + quantized + state


def _parameters_held(args: argparse.Namespace) -> tuple[int, int]:
    """Of a pipeline stage's layers, by one process: (parameters without experts, those of experts)."""
    dense, experts = parameters_of_layers(args)
    # all but norms and learned positions, which are small, is divided over the tensor-parallel ranks
    latents, stages = LatentSizes.of(args), args.pipeline_model_parallel_size
    whole = 0 if latents is None else args.num_layers * latents.down_projections(args.hidden_size)
    held = (whole + (dense - whole) // args.tensor_model_parallel_size) // stages
    return held, experts // (args.expert_model_parallel_size * args.expert_tensor_parallel_size * stages)


def _outside_layers(args: argparse.Namespace) -> int:
    """Parameters of the embedding and the head; of several stages the first has the one, the last the other."""
    rest = embedding_parameters(args) or 0
    apart = args.pipeline_model_parallel_size > 1 and args.untie_embeddings_and_output_weights
    return rest // (2 if apart else 1) // args.tensor_model_parallel_size


def _ranks_that_share_optimizer_state(args: argparse.Namespace) -> tuple[int, int]:
    """(of what is not an expert's, of experts')."""
    if not args.use_distributed_optimizer:
        return 1, 1
    ranks = args.world_size // args.pipeline_model_parallel_size // args.num_distributed_optimizer_instances
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return max(1, ranks // args.tensor_model_parallel_size), max(1, ranks // experts)


def activation_bytes(args: argparse.Namespace) -> int:
    """What the forward pass of one micro batch keeps: of each layer's linears and norms the inputs, and the logits.

    Tensor parallelism divides heads, MLP and logits, sequence parallelism the residual stream as well, context parallelism the tokens. A
    pipeline's first stage keeps its part of as many micro batches as there are stages: one in all. Of layers that are recomputed as a
    whole the input stays, and all of those that one recomputation makes again.
    """
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    tensor, width = args.tensor_model_parallel_size, 2 if args.bf16 or args.fp16 else 4
    residual = args.hidden_size // (tensor if args.sequence_parallel else 1)
    per_layer = 4 * residual + _attention_activations(args) + _mlp_activations(args) // tensor
    kept, inputs = _layers_kept(args)
    logits = (padded_vocab_size(args) or 0) // tensor * (width + 4)
    return tokens * (width * (kept * per_layer + inputs * residual) + logits)


def _layers_kept(args: argparse.Namespace) -> tuple[int, int]:
    """(layers of which all is kept, places of which the input is)."""
    layers = args.num_layers
    if args.recompute_granularity != "full":
        return layers, 0
    run = min(args.recompute_num_layers or 1, layers)
    if args.recompute_method == "block":
        return layers - run + 1, run
    return run, -(-layers // run)


def _mlp_activations(args: argparse.Namespace) -> int:
    """What a layer's MLP or experts keep of a token."""
    gate, ffn = 3 if args.swiglu or args.quick_geglu else 2, args.ffn_hidden_size
    if args.num_experts is not None:  # most layers have them, and each token goes to several
        routed = args.moe_router_topk * (args.moe_ffn_hidden_size or ffn)
        all_moe = all(moe_layer_pattern(args.moe_layer_freq, args.num_layers))
        ffn = max(0 if all_moe else ffn, routed) + (args.moe_shared_expert_intermediate_size or 0)
    return gate * ffn


def _attention_activations(args: argparse.Namespace) -> int:
    """What a layer's attention keeps of a token: queries, keys, values and what comes of them; latents before and after their norms."""
    heads, tensor, latents = args.num_attention_heads, args.tensor_model_parallel_size, LatentSizes.of(args)
    if latents is None:
        groups = args.num_query_groups if args.group_query_attention else heads
        return 2 * (heads + groups) * args.kv_channels // tensor
    width = (latents.q_lora_rank or 0) + latents.kv_lora_rank + latents.qk_pos_emb_head_dim
    return 2 * heads * (latents.score_channels + latents.v_head_dim) // tensor + 2 * width // (tensor if args.sequence_parallel else 1)
