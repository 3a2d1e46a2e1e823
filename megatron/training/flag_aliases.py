"""Spellings and meanings that differ: flags that were renamed or removed, flags not supported yet, flags that stand for other settings."""

import argparse
from functools import cache
from pathlib import Path

# old spelling -> what to type instead
RENAMED: dict[str, str] = {
    "--batch-size": "use --micro-batch-size",
    "--warmup": "use --lr-warmup-fraction",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--local_rank": "use --local-rank, or start with torchrun, which sets LOCAL_RANK",
    "--layernorm-epsilon": "use --norm-epsilon",
    "--use-checkpoint-lr-scheduler": "use --use-checkpoint-opt_param-scheduler",
    "--override-lr-scheduler": "use --override-opt_param-scheduler",
    "--no-query-key-layer-scaling": "leave it out; --apply-query-key-layer-scaling is off by default",
    "--multi-query-attention": "use --group-query-attention --num-query-groups 1",
    "--start-wd": "use --start-weight-decay",
    "--end-wd": "use --end-weight-decay",
    "--wd-incr-style": "use --weight-decay-incr-style",
    "--log-batch-size-to-tensorboard": "leave it out; the batch size is always written",
    "--no-log-learnig-rate-to-tensorboard": "leave it out; the learning rate is always written",
    "--data-impl": "leave it out; .bin and .idx files are the only kind",
    "--DDP-impl": "leave it out; there is one implementation",
    "--bias-swiglu-fusion": "leave it out; it is on by default, --no-bias-swiglu-fusion switches it off",
    "--use-gpu-initialization": "leave it out; it is the default",
    "--checkpoint-activations": "use --recompute-granularity",
    "--checkpoint-granularity": "use --recompute-granularity",
    "--checkpoint-method": "use --recompute-method",
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--activations-checkpoint-method": "use --recompute-granularity full --recompute-method",
    "--activations-checkpoint-num-layers": "use --recompute-num-layers",
    "--expert-parallel": "use --expert-model-parallel-size",
    "--moe-frequency": "use --moe-layer-freq",
    "--moe-loss-coeff": "use --moe-aux-loss-coeff",
    "--moe-router-type": "use --moe-router-load-balancing-type",
    "--moe-token-dropping": "use --moe-expert-capacity-factor",
    "--model-spec": "use --spec",
    "--hybrid-mlp-ratio": "use --hybrid-layer-pattern",
    "--hybrid-attention-ratio": "use --hybrid-layer-pattern",
    "--tokenizer-hf-include-special-tokens": "leave it out; --tokenizer-hf-no-include-special-tokens switches it off",
    "--tokenizer-hf-use-fast": "leave it out; it is the default",
    "--tiktoken-special-tokens": "use --tokenizer-special-tokens",
    "--legacy-tokenizer": "leave it out; there is one kind of tokenizer class",
    "--use-custom-fsdp": "use --use-megatron-fsdp",
    "--s3-cache-path": "use --object-storage-cache-path",
    "--overlap-p2p-communication": "leave it out; it is on by default",
    "--tp-comm-split-rs": "leave it out; it is on by default",
    "--tp-comm-split-ag": "leave it out; it is on by default",
    "--tp-comm-bulk-wgrad": "leave it out; it is on by default",
    "--tp-comm-bulk-dgrad": "leave it out; it is on by default",
    "--img-dim": "use --img-h and --img-w",
}

# gone from Megatron-LM without a successor
REMOVED = frozenset(
    {
        "--no-async-tensor-model-parallel-allreduce",
        "--async-tensor-model-parallel-allreduce",
        "--async-tensor-parallel-allreduce",
        "--use-legacy-models",
        "--initialize-socket-comms",
        "--no-scatter-gather-tensors-in-pipeline",
        "--no-contiguous-buffers-in-local-ddp",
        "--use-contiguous-buffers-in-ddp",
        "--mmap-warmup",
        "--embedding-weights-in-fp32",
        "--no-delay-grad-reduce",
        "--delay-param-gather",
        "--align-param-gather",
        "--renormalize-blend-weights",
        "--standalone-embedding-stage",
        "--standalone-embed-stage",
        "--pipeline-model-parallel-split-rank",
        "--encoder-tensor-model-parallel-size",
        "--encoder-pipeline-model-parallel-size",
        "--deallocate-pipeline-outputs",
        "--model-parallel-memory-opt",
        "--checkpoint-attention",
        "--distribute-checkpointed-activations",
        "--distribute-recomputed-activations",
        "--distrib-opt-comm-mem-savings",
        "--validate-model-load",
        "--load-model-opt-format",
        "--empty-unused-memory-each-iter",
        "--no-log-memory-to-tensorboard",
        "--one-logger-entity",
        "--enable-one-logger",
        "--enable-onelogger",
        "--moe-use-legacy-grouped-gemm",
        "--moe-extended-tp",
        "--moe-router-topk-limited-devices",
        "--muon-use-nesterov",
    }
)

# a switch that people give a value -> the flag that takes it
MEANT_WITH_VALUE: dict[str, str] = {
    "--group-query-attention": "--num-query-groups",
    "--sequence-parallel": "--tensor-model-parallel-size",
    "--exit-signal-handler": "--exit-signal",
}

# given flag -> (dest it stands for, value); an explicit other value of that dest is a contradiction
STANDS_FOR: dict[str, tuple[str, str]] = {
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "use_flash_attn": ("attention_backend", "flash"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "fp8_hybrid": ("fp8", "hybrid"),
    "fp8_e4m3": ("fp8", "e4m3"),
}

# flag -> TransformerConfig fields; activation functions by their name in torch.nn.functional or megatron.core.activations
ACTIVATIONS: dict[str, dict[str, object]] = {
    "swiglu": {"activation_func": "silu", "gated_linear_unit": True},
    "quick_geglu": {"activation_func": "quick_gelu", "gated_linear_unit": True},
    "squared_relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
    "openai_gelu": {"activation_func": "fast_gelu", "gated_linear_unit": False},
}


@cache
def not_supported_yet() -> frozenset[str]:
    """Spellings of Megatron-LM's flags that this version lacks."""
    path = Path(__file__).parent / "config" / "not_supported_yet.txt"
    return frozenset(line for line in path.read_text().split() if line.startswith("--"))


def apply_meanings(args: argparse.Namespace) -> None:
    """Carry out STANDS_FOR, where the target was left at its default."""
    for dest, (target, value) in STANDS_FOR.items():
        if getattr(args, dest, False) and target not in args.provenance:
            setattr(args, target, value)
            args.provenance[target] = args.provenance.get(dest, "default")
