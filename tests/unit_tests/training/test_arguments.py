"""Parsing, checking, precedence, YAML, exit codes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core import device, optional_imports
from megatron.training import arguments, model_size
from megatron.training.argument_utils import UsageError, build_parser, check_tokens
from megatron.training.arguments import apply_checkpoint_args, parse_args, validate_args, was_given
from megatron.training.config import checks
from tests.unit_tests.training.lines import TINY, checked, without

# Command lines as people type them (the data made up): name -> (line, flags that are named as not supported yet)
RECIPES: dict[str, tuple[str, list[str]]] = {
    "gpt 345m": (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 8 --global-batch-size 32 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine "
        "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --mock-data --vocab-size 50257 "
        "--tokenizer-type NullTokenizer --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 "
        "--save /tmp/none --load /tmp/none --use-mcore-models --attention-softmax-in-fp32 --no-gradient-accumulation-fusion "
        "--timing-log-level 0 --transformer-impl local --split 949,50,1 --distributed-backend nccl --use-flash-attn",
        [],
    ),
    "llama 8b, 8 layers": (
        "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 "
        "--rotary-percent 1.0 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 4 --train-samples 1953125 --lr 3e-4 "
        "--lr-decay-samples 1949218 --lr-warmup-samples 3906 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
        "--mock-data --vocab-size 128256 --tokenizer-type NullTokenizer --init-method-std 0.0134 --manual-gc --num-workers 6 "
        "--no-create-attention-mask-in-dataloader --distributed-timeout-minutes 60 --log-throughput --log-params-norm --exit-interval 500 "
        "--exit-duration-in-mins 230 --no-mmap-bin-files --transformer-impl transformer_engine --attention-backend fused",
        [],
    ),
    "the same with what comes later": (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
        "--train-iters 10 --lr 3e-4 --mock-data --vocab-size 100 --tokenizer-type NullTokenizer --use-distributed-optimizer --async-save "
        "--save checkpoints --save-interval 5 "
        "--moe-latent-size 64 --moe-use-upcycling "
        "--deterministic-mode",
        ["--moe-latent-size", "--moe-use-upcycling"],
    ),
}  # fmt: skip

REQUIRED = [
    "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings", "--micro-batch-size",
    "--train-iters", "--lr", "--mock-data", "--tokenizer-type", "--vocab-size",
]  # fmt: skip

# (flags added to TINY, processes, parts that the one message must have); "-X" takes the flag X away first
FP8 = "--fp8-format hybrid --bf16"
LATENT = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
BAD = [
    ("--hidden-size 65", 1, ["--hidden-size 65", "--num-attention-heads 4", "--hidden-size 64 or --hidden-size 68"]),
    ("--group-query-attention --num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"]),
    ("--group-query-attention 2", 1, ["takes no value; did you mean --num-query-groups 2"]),
    ("--swiglu --squared-relu", 1, ["--squared-relu", "--swiglu"]),
    ("--seq-length 64", 1, ["--seq-length 64", "--max-position-embeddings 64"]),
    ("--position-embedding-type yarn", 1, ["yarn is not built yet", "rope"]),
    ("--use-rotary-position-embeddings --position-embedding-type none", 1, ["asks for rope"]),
    ("--no-position-embedding", 1, ["--no-position-embedding", "learned_absolute"]),
    ("--position-embedding-type rope --kv-channels 15", 1, ["15 rotating channels", "even"]),
    ("--position-embedding-type rope --rotary-percent 0", 1, ["--rotary-percent 0.0", "more than 0"]),
    ("--hidden-dropout 1.0", 1, ["--hidden-dropout 1.0", "below 1"]),
    ("--global-batch-size 9", 1, ["--micro-batch-size 2 x data-parallel size 1 = 2", "--global-batch-size 8 or --global-batch-size 10"]),
    ("--global-batch-size 8", 3, ["data-parallel size 3 = 6", "--global-batch-size 6 or --global-batch-size 12"]),
    ("--micro-batch-size 0", 1, ["--micro-batch-size 0", "at least 1 samples"]),
    ("--rampup-batch-size 2 2 10", 1, ["--rampup-batch-size 2 2 10", "--train-samples"]),
    ("-train-iters --train-samples 100 --rampup-batch-size 3 2 10", 1, ["the start 3"]),
    ("-train-iters --train-samples 100 --rampup-batch-size 2 4 10", 1, ["does not meet --global-batch-size 8", "--global-batch-size 6"]),
    ("--rampup-batch-size 2 2", 1, ["takes 3 values, given 2"]),
    ("--step-batch-size-schedule 0:4,1K:8", 1, ["--step-batch-size-schedule 0:4,1K:8", "needs a length in samples"]),
    ("-train-iters --train-samples 100 --step-batch-size-schedule 0:4,1K:7,2K:8", 1, ["the size 7 must be a multiple of", "6 or 8"]),
    ("-train-iters --train-samples 100 --step-batch-size-schedule 1:4", 1, ["must start at 0 tokens and rise"]),
    ("-train-iters --train-samples 100 --step-batch-size-schedule 0:4,1K:16", 1,
     ["--global-batch-size 8", "must be the last size of --step-batch-size-schedule, 16"]),
    ("-train-iters --train-samples 100 --step-batch-size-schedule 0:4,1K:8 --rampup-batch-size 2 2 10", 1,
     ["excludes --rampup-batch-size"]),
    ("-train-iters --train-samples 100 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--step-batch-size-schedule 0:6,1K:8", 2, ["the size 6 must be a multiple of 4", "2 virtual stages"]),
    ("--train-samples 100", 1, ["--train-samples 100", "excludes --train-iters 10"]),
    ("--lr-decay-samples 100", 1, ["--lr-decay-samples 100", "--lr-decay-iters"]),
    ("--lr-warmup-samples 100", 1, ["--lr-warmup-samples 100", "--lr-warmup-iters"]),
    ("-train-iters --train-samples 100 --lr-warmup-iters 2", 1, ["--lr-warmup-iters 2", "--lr-warmup-samples"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "at 10 iters"]),
    ("--lr-warmup-fraction 1.0", 1, ["--lr-warmup-fraction 1.0"]),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", 1, ["excludes --lr-warmup-iters 2"]),
    ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
    ("--lr-decay-style WSD", 1, ["needs the length of its decay", "--lr-wsd-decay-iters 1"]),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 3", 1, ["--lr-wsd-decay-iters 9", "7 iters"]),
    ("--decoupled-min-lr 0.1", 1, ["--decoupled-lr"]),
    ("--override-opt_param-scheduler --use-checkpoint-opt-param-scheduler", 1, ["excludes"]),
    ("--start-weight-decay 0.1", 1, ["--weight-decay-incr-style linear"]),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.1", 1, ["--end-weight-decay", "is required"]),
    ("--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.01", 1, ["--end-weight-decay 0.01"]),
    ("--recompute-granularity full --recompute-num-layers 1", 1, ["--recompute-method uniform"]),
    ("--recompute-granularity full --recompute-method block", 1, ["--recompute-num-layers", "is required"]),
    ("--recompute-method block", 1, ["--recompute-method block", "--recompute-granularity full"]),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", 1, ["--recompute-num-layers 9", "between 1 and"]),
    ("--recompute-modules mlp", 1, ["--recompute-modules mlp", "--recompute-granularity selective"]),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-activations", 1, ["asks for selective"]),
    ("--overlap-param-gather --overlap-grad-reduce", 1, ["--overlap-param-gather", "needs --use-distributed-optimizer"]),
    ("--overlap-param-gather --use-distributed-optimizer", 1, ["--overlap-param-gather", "needs --overlap-grad-reduce"]),
    ("--deterministic-mode --attention-backend fused", 1, ["--attention-backend fused", "--attention-backend flash"]),
    ("--fp16 --bf16", 1, ["--fp16", "--bf16"]),
    ("--initial-loss-scale 0.5", 1, ["--min-loss-scale 1.0", "0.5"]),
    ("--optimizer muon", 1, ["--optimizer muon", "adam, sgd"]),
    ("--optimizer admn", 1, ["--optimizer admn", "--optimizer adam"]),
    ("--adam-beta2 -1e-3", 1, ["--adam-beta2 -0.001", "at least 0"]),
    ("--lr nan", 1, ["--lr nan", "finite"]),
    ("--num-workers many", 1, ["--num-workers many", "whole number", "--num-workers 2"]),
    ("--save-interval 5", 1, ["--save-interval 5", "--save"]),
    ("--ckpt-step 5", 1, ["--ckpt-step 5", "--load"]),
    ("--use-checkpoint-args", 1, ["--use-checkpoint-args", "--load"]),
    ("--load /nowhere/at/all --exit-on-missing-checkpoint", 1, ["/nowhere/at/all", "latest_checkpointed_iteration.txt"]),
    ("--ckpt-format fsdp_dtensor", 1, ["--ckpt-format fsdp_dtensor", "torch_dist"]),
    ("--metrics-file /tmp", 1, ["--metrics-file /tmp", "is a folder"]),
    ("--save /dev/null", 1, ["--save /dev/null", "folder"]),
    ("--save s3://bucket/run", 1, ["--save s3://bucket/run", "object storage is not supported"]),
    ("--load gs://bucket/run", 1, ["--load gs://bucket/run", "object storage is not supported"]),
    ("--fp8-hybrid", 1, ["--bf16", "is needed by FP8", "works: --bf16"]),
    (f"{FP8} --hidden-size 72", 1, ["--hidden-size 72", "works: --hidden-size 80"]),
    (
        f"{FP8} --num-experts 4 --moe-shared-expert-intermediate-size 50",
        1,
        ["--moe-shared-expert-intermediate-size 50", "gives a rank 50 channels of the shared experts", "size 64"],
    ),
    (
        f"{FP8} --fp8-recipe blockwise --num-experts 4 --moe-grouped-gemm --moe-ffn-hidden-size 40",
        1,
        ["--moe-ffn-hidden-size 40", "gives a rank 40 channels of an expert", "size 48"],
    ),
    (f"{FP8} {LATENT} --q-lora-rank 25", 1, ["--q-lora-rank 25", "multiple of 16", "--q-lora-rank 32"]),
    (f"{FP8} {LATENT} --kv-lora-rank 20", 1, ["--kv-lora-rank 20", "multiple of 16", "--kv-lora-rank 32"]),
    (f"{FP8} {LATENT} --v-head-dim 5", 1, ["--v-head-dim 5", "rows of values", "--v-head-dim 16"]),
    ("--fp8-hybrid --fp8-format e4m3 --bf16", 1, ["--fp8-format e4m3", "--fp8-hybrid asks for hybrid"]),
    ("--fp8-format hybrid --bf16 --ffn-hidden-size 72", 1, ["--ffn-hidden-size 72", "gives a rank 72 channels", "--ffn-hidden-size 80"]),
    ("--fp8-format e4m3 --bf16 --fp8-margin 18", 1, ["--fp8-margin 18", "between 0 and 17", "works: --fp8-margin 0"]),
    ("--fp8-format e4m3 --bf16 --fp8-margin -1", 1, ["--fp8-margin -1", "between 0 and 17", "works: --fp8-margin 0"]),
    ("--enable-cuda-graph --cuda-graph-impl full_iteration", 1, ["--cuda-graph-impl full_iteration", "--enable-cuda-graph asks for local"]),
    ("--enable-cuda-graph --cuda-graph-impl none", 1, ["--cuda-graph-impl none", "--enable-cuda-graph asks for local"]),
    ("--fp8-format e4m3 --bf16 --fp8-recipe custom", 1, ["--fp8-recipe custom", "is not built yet"]),
    (
        "--fp8-format e4m3 --bf16 --first-last-layers-bf16 --num-layers-at-end-in-bf16 9",
        1,
        ["--num-layers-at-end-in-bf16 9", "between 0 and the model's 4 layers"],
    ),
    ("--fp8-format e4m3 --bf16 --save /tmp/none --ckpt-format torch", 1, ["--ckpt-format torch", "--ckpt-format torch_dist"]),
    ("--fp8-format e4m3 --bf16 --save /tmp/none --ckpt-format torch_dcp", 1, ["--ckpt-format torch_dcp", "--ckpt-format torch_dist"]),
    ("--exit-signal-handler --exit-signal SIGKILL", 1, ["--exit-signal SIGKILL", "SIGTERM"]),
    ("--exit-signal SIGFOO", 1, ["--exit-signal SIGFOO"]),
    ("--data-path a", 1, ["--data-path a", "--mock-data"]),
    ("-mock-data --data-path /no/such", 1, ["/no/such.bin", "/no/such.idx"]),
    ("-mock-data --data-path 0.5 /no/such 0.5", 1, ["a weight before each prefix"]),
    ("-mock-data --data-path", 1, ["at least one prefix"]),
    ("--split 9,x", 1, ["--split 9,x", "90,5,5"]),
    ("--split 0,0,0", 1, ["--split 0,0,0"]),
    ("--split 1,1,1,1", 1, ["--split 1,1,1,1"]),
    ("--split 90,10,", 1, ["--split 90,10,", "90,5,5"]),
    ("--fp16-lm-cross-entropy", 1, ["--fp16-lm-cross-entropy", "does not support yet"]),
    ("--tokenizer-type SentencePieceTokenizer", 1, ["--tokenizer-model", "is required"]),
    ("--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/file", 1, ["--tokenizer-model /no/file", "no such file"]),
    ("--tokenizer-type MultimodalTokenizer", 1, ["MultimodalTokenizer is not built yet"]),
    ("--vocab-extra-ids 3", 1, ["--vocab-extra-ids 3"]),
    ("--padded-vocab-size 64", 1, ["--padded-vocab-size 64", "--vocab-size 100"]),
    ("--batch-size 4", 1, ["--batch-size 4", "--micro-batch-size"]),
    ("--no-async-tensor-model-parallel-allreduce", 1, ["removed"]),
    ("--moe-latent-size 8", 1, ["--moe-latent-size", "does not support yet"]),
    ("--num-layer 4", 1, ["--num-layer 4", "--num-layers"]),
    ("--num_layers 4", 1, ["did you mean --num-layers"]),
    ("--transformer-impl inference_optimized", 1, ["inference_optimized", "local"]),
    ("--tensorboard-dir", 1, ["--tensorboard-dir", "takes one value, given none"]),
    ("--wandb-project p --wandb-exp-name n", 1, ["--wandb-project p", "pip install wandb"]),
]  # fmt: skip
BAD_EXPERTS = [
    ("--num-experts 6 --expert-model-parallel-size 4", 4, ["--num-experts 6", "--expert-model-parallel-size 4", "--num-experts 8"]),
    ("--expert-model-parallel-size 2", 2, ["--expert-model-parallel-size 2", "a model with experts"]),
    ("--num-experts 4 --moe-router-topk 5", 1, ["--moe-router-topk 5", "between 1 and the 4 experts"]),
    ("--num-experts 4 --moe-router-topk 1", 1, ["--moe-router-topk 1", "--moe-router-pre-softmax"]),
    ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*2)", 1, ["--moe-layer-freq", "lists 3 layers, but the model has 4"]),
    ("--num-experts 4 --moe-layer-freq __import__('os')", 1, ["--moe-layer-freq", "another form"]),
    ("--num-experts 4 --moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 1 1", 1, ["only the losses", "combine"]),
    ("--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1", 1, ["1 given for 2", "0.01 0.01"]),
    ("--num-experts 4 --moe-router-load-balancing-type quantile_balancing", 1, ["quantile_balancing is not built yet"]),
    ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1", 1, ["sinkhorn has no balance loss"]),
    ("--num-experts 4 --moe-router-enable-expert-bias", 1, ["--moe-router-enable-expert-bias", "--moe-router-score-function sigmoid"]),
    ("--num-experts 8 --moe-router-num-groups 4", 1, ["--moe-router-num-groups 4", "--moe-router-group-topk"]),
    ("--num-experts 8 --moe-router-num-groups 8 --moe-router-group-topk 1", 1, ["do not hold --moe-router-topk 2"]),
    ("--num-experts 4 --moe-pad-expert-input-to-capacity", 1, ["needs --moe-expert-capacity-factor"]),
    ("--num-experts 4 --moe-shared-expert-gate", 1, ["needs --moe-shared-expert-intermediate-size"]),
    ("--num-experts 4 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap", 1, ["--moe-token-dispatcher-type alltoall"]),
    ("--num-experts 4 --moe-enable-deepep", 1, ["--moe-enable-deepep", "is for --moe-token-dispatcher-type flex", "works: leave it out"]),
    ("--num-experts 4 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-flex-dispatcher-backend deepep", 1,
     ["needs the package deep_ep", "not installed", "works: --moe-token-dispatcher-type alltoall"]),
    ("--num-experts 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep", 1,
     ["ncclep is not built yet", "works: --moe-flex-dispatcher-backend deepep"]),
    ("--num-experts 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2,
     ["--expert-model-parallel-size 2", "needs --sequence-parallel"]),
    ("--num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 2, ["--expert-tensor-parallel-size 1", "without"]),
    ("--num-experts 4 --sequence-parallel --tensor-model-parallel-size 2 --moe-ffn-hidden-size 7", 2, ["--moe-ffn-hidden-size 7"]),
]  # fmt: skip
# the layout's arithmetic, whose refusals stand beside "not built yet"
BAD_LAYOUT = [
    ("--num-layers 3 --pipeline-model-parallel-size 2", 2,
     ["3 layers", "--pipeline-model-parallel-size 2", "--decoder-first-pipeline-num-layers", "--num-layers 2 or --num-layers 4"]),
    ("--decoder-last-pipeline-num-layers 1", 1, ["--decoder-last-pipeline-num-layers 1", "--pipeline-model-parallel-size above 1"]),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6", 2,
     ["--global-batch-size 6", "3 micro batches", "--micro-batch-size 2", "data-parallel size 1",
      "--global-batch-size 4 or --global-batch-size 8"]),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2, ["must divide the 2 layers"]),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", 2,
     ["4 layers", "1 in the first and 1 in the last"]),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --num-virtual-stages-per-pipeline-rank 2", 2,
     ["--num-virtual-stages-per-pipeline-rank 2", "excludes --pipeline-schedule zero-bubble"]),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --no-gradient-accumulation-fusion", 2,
     ["--pipeline-schedule zero-bubble", "leave --no-gradient-accumulation-fusion out"]),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16 --rampup-batch-size 2 2 100", 2,
     ["--rampup-batch-size 2 2 100", "multiples of 4", "--rampup-batch-size 4 4 100"]),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL", 2, ["has 2 decoder layers, t: the model has 4"]),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etx|tttL", 2, ["at character 3 'x' means nothing"]),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL --num-virtual-stages-per-pipeline-rank 2", 2,
     ["--num-virtual-stages-per-pipeline-rank 2", "excludes --pipeline-model-parallel-layout"]),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL --global-batch-size 6", 2,
     ["--global-batch-size 6", "2 virtual stages on each of 2 pipeline ranks"]),
    ("--pipeline-model-parallel-layout EttttL", 1, ["--pipeline-model-parallel-layout EttttL", "--pipeline-model-parallel-size above 1"]),
    ("--pipeline-schedule zero-bubble", 1, ["--pipeline-schedule zero-bubble", "--pipeline-model-parallel-size above 1"]),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2", 2,
     ["--num-virtual-stages-per-pipeline-rank 2", "must divide the 1 layers"]),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --num-layers-per-virtual-pipeline-stage 1", 2,
     ["--num-layers-per-virtual-pipeline-stage 1", "give --num-virtual-stages-per-pipeline-rank"]),
    ("--tensor-model-parallel-size 2 --global-batch-size 6", 3,
     ["3 processes", "tensor 2 x pipeline 1 x context 1 = 2", "2 or 4 processes"]),
    ("--tensor-model-parallel-size 3 --global-batch-size 6", 3, ["--num-attention-heads 4", "--tensor-model-parallel-size 3"]),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 3", 4, ["instances 3", "divide the data-parallel size 4"]),
    ("--num-distributed-optimizer-instances 2", 4, ["needs --use-distributed-optimizer"]),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 4 --expert-model-parallel-size 2", 4,
     ["the 2 ranks", "same experts"]),
    ("--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --expert-model-parallel-size 2", 4, ["different pipelines", "leave it out"]),
    ("--ddp-bucket-size 5 --ddp-num-buckets 2", 1, ["excludes --ddp-bucket-size"]),
    ("--ddp-reduce-scatter-with-fp32-accumulation", 2, ["needs --use-distributed-optimizer"]),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", 1, ["excludes --accumulate-allreduce-grads-in-fp32"]),
    ("--expert-model-parallel-size 2 --global-batch-size 6", 3, ["3 processes", "expert 2"]),
    ("--context-parallel-size 2 --seq-length 31", 2, ["--seq-length 31", "2 x --context-parallel-size 2 = 4", "--seq-length 32"]),
    ("--microbatch-group-size-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2", 2, ["needs virtual stages"]),
    ("--overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication", 1, ["excludes --no-overlap-p2p-communication"]),
    ("--tp-comm-overlap --tensor-model-parallel-size 2", 2, ["--tp-comm-overlap: needs --sequence-parallel"]),
    ("--tp-comm-overlap", 1, ["--tp-comm-overlap: needs", "--tensor-model-parallel-size above 1", "(works: leave it out)"]),
    ("--tp-comm-overlap-rs-dgrad --tensor-model-parallel-size 2 --sequence-parallel", 2, ["part of --tp-comm-overlap, which is off"]),
    ("--tensor-model-parallel-size 0", 1, ["--tensor-model-parallel-size 0", "at least 1"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process without optional packages, wherever the tests run."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    there = optional_imports.available
    monkeypatch.setattr(optional_imports, "available", lambda name: name not in ("wandb", "deep_ep") and there(name))


def changed(flags: str) -> list[str]:
    words = flags.split()
    dropped = ["-" + w for w in words if w.startswith("-") and not w.startswith("--") and not w[1:2].isdigit()]
    return without(*dropped) + [w for w in words if "-" + w not in dropped]


def problems_of(line: list[str]) -> list[str]:
    with pytest.raises(UsageError) as caught:
        checked(line)
    return [str(problem) for problem in caught.value.problems]


def test_a_valid_line_is_accepted_and_completed() -> None:
    args = checked(TINY)
    assert (args.ffn_hidden_size, args.kv_channels, args.data_parallel_size, args.split) == (256, 16, 1, "969,30,1")
    assert (args.rank, args.world_size, args.consumed_train_samples, args.dataloader_type) == (0, 1, 0, "single")
    assert was_given(args, "num_layers") and not was_given(args, "ffn_hidden_size") and not was_given(args, "bf16")
    assert args.provenance["ffn_hidden_size"] == "derived" and "clip_grad" not in args.provenance
    assert validate_args(args) is args  # may be called again


@pytest.mark.parametrize("flags, world, parts", BAD + BAD_EXPERTS, ids=[row[0] for row in BAD + BAD_EXPERTS])
def test_each_rule_names_flag_value_and_remedy(flags: str, world: int, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    found = problems_of(changed(flags))
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize("more", ["", "--fp16", "--bf16"])
def test_deepep_is_given_bf16_alone(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_imports, "available", lambda name: name == "deep_ep")
    line = [*TINY, *f"--num-experts 4 --moe-token-dispatcher-type flex {more}".split()]
    assert checked(line).moe_token_dispatcher_type == "flex"  # one expert-parallel rank sends nothing
    monkeypatch.setenv("WORLD_SIZE", "2")
    line += ["--expert-model-parallel-size", "2"]
    if more == "--bf16":
        assert checked(line).bf16
    else:
        (found,) = problems_of(line)
        assert found == "--moe-token-dispatcher-type flex: DeepEP sends tokens in bf16 alone; alltoall sends any (works: --bf16)"


@pytest.mark.parametrize("flags, world, parts", BAD_LAYOUT, ids=[row[0] for row in BAD_LAYOUT])
def test_layouts_are_refused_by_their_arithmetic(flags: str, world: int, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    found = problems_of(changed(flags))
    assert any(all(part in problem for part in parts) for problem in found), found
    # the dry run says the same without processes
    monkeypatch.delenv("WORLD_SIZE")
    assert problems_of([*changed(flags), "--check-config", "--check-config-world-size", str(world)]) == found


@pytest.mark.parametrize("flag", REQUIRED)
def test_a_missing_flag_is_named(flag: str) -> None:
    (found,) = problems_of(without(flag))
    named = {"--mock-data": "--data-path"}.get(flag, flag)
    assert found.startswith(named) and "is required" in found


def test_all_missing_flags_are_listed_at_once() -> None:
    found = "\n".join(problems_of([]))
    assert all(f"{flag}: is required" in found for flag in REQUIRED if flag not in ("--mock-data", "--vocab-size"))
    assert "--data-path: is required (or --mock-data)" in found


def test_problems_of_reading_and_of_checking_come_together() -> None:
    found = "\n".join(problems_of([*TINY, "--fooo", "--lr", "abc", "--hidden-size", "66", "--swiglu", "--openai-gelu", "--seed", "0"]))
    assert all(part in found for part in ("--fooo", "--lr abc", "--hidden-size 66", "--openai-gelu", "--seed 0"))
    assert "--lr: is required" not in found


NEEDS_MORE = {
    "--check-config", "--exit-on-missing-checkpoint", "--log-progress", "--no-position-embedding", "--sequence-parallel",
    "--use-checkpoint-args", "--help", "--overlap-param-gather", "--ddp-reduce-scatter-with-fp32-accumulation",
    "--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad", "--cp-comm-overlap", "--sft", "--fim-data", "--async-save", "--fp8-hybrid",
    "--fp8-e4m3",
}  # fmt: skip
SWITCHES = [name for action in build_parser()._actions if action.nargs == 0 and (name := action.option_strings[-1]) not in NEEDS_MORE]


@pytest.mark.parametrize("flag", SWITCHES)
def test_no_feature_fails_because_of_an_untouched_default(flag: str) -> None:
    args = checked([*TINY, flag])
    config = arguments.core_transformer_config_from_args(args)
    arguments.ddp_config_from_args(args)
    arguments.optimizer_config_from_args(args)
    arguments.gpt_dataset_config_from_args(args, tokenizer=object())
    assert config.num_layers == 4


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--num-layers-at-start-in-bf16 2", "--num-layers-at-start-in-bf16: no effect without --first-last-layers-bf16"),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 3", "keeps all 4 layers in bf16: none is in FP8"),
        ("--fp8-recipe tensorwise --fp8-margin 1", "--fp8-margin: no effect with --fp8-recipe tensorwise"),
        ("--cuda-graph-warmup-steps 5", "--cuda-graph-warmup-steps 5 has no effect without --cuda-graph-impl"),
    ],
)
def test_idle_flags_of_fp8_and_graphs_are_named(flags: str, note: str) -> None:
    assert note in "\n".join(checked(changed(f"{FP8} {flags}")).notes)
    assert note not in "\n".join(checked(changed(FP8)).notes)


def test_gradient_flags_reach_the_config() -> None:
    def config(line: str) -> Any:
        return arguments.ddp_config_from_args(checked([*TINY, *line.split()]))

    spread = "--use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation --bf16"
    assert not config(f"{spread} --grad-reduce-in-bf16").grad_reduce_in_fp32 and config(spread).grad_reduce_in_fp32
    assert config(spread).reduce_scatter_with_fp32_accumulation
    assert config("--ddp-bucket-size 500").bucket_size == 500 and config("--ddp-num-buckets 3").num_buckets == 3
    assert config("--ddp-average-in-collective").average_in_collective and not config("").average_in_collective
    assert config("--ddp-pad-buckets-for-high-nccl-busbw").pad_buckets_for_high_nccl_busbw
    idle = "--no-align-grad-reduce --no-align-param-gather --no-gradient-reduce-div-fusion"
    assert config(idle) == replace(config(""), gradient_reduce_div_fusion=False, align_param_gather=False)
    with mock.patch.dict("os.environ", WORLD_SIZE="4"):
        assert config("--use-distributed-optimizer --num-distributed-optimizer-instances 2").num_distributed_optimizer_instances == 2
    (note,) = checked([*TINY, "--grad-reduce-in-bf16"]).notes
    assert "no effect without --bf16" in note


def test_configs_carry_the_flags() -> None:
    import torch

    from megatron.core.transformer.enums import AttnBackend

    line = "--bf16 --swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 2 --seed 7"
    args = checked([*TINY, *line.split(), "--attention-backend", "flash", "--no-persist-layer-norm", "--norm-epsilon", "1e-6"])
    config = arguments.core_transformer_config_from_args(args)
    assert (config.gated_linear_unit, config.activation_func, config.ffn_hidden_size) == (True, torch.nn.functional.silu, 128)
    assert (config.add_bias_linear, config.normalization, config.num_query_groups, config.layernorm_epsilon) == (False, "RMSNorm", 2, 1e-6)
    assert (config.params_dtype, config.attention_backend, config.init_seed) == (torch.bfloat16, AttnBackend.flash, 7)
    assert config.bias_activation_fusion and not config.persist_layer_norm and config.gradient_accumulation_fusion
    assert arguments.ddp_config_from_args(args).grad_reduce_in_fp32 and arguments.ddp_config_from_args(args).check_for_nan_in_grad
    optimizer = arguments.optimizer_config_from_args(args)
    assert (optimizer.bf16, optimizer.lr, optimizer.weight_decay) == (True, 1e-3, 0.01)
    assert not arguments.core_transformer_config_from_args(checked([*TINY, "--disable-bias-linear"])).bias_activation_fusion
    data = arguments.gpt_dataset_config_from_args(args, tokenizer=object())
    assert data.mock and data.split == "969,30,1" and data.sequence_length == 32 and data.random_seed == 7 and data.vocab_size is None


def test_schedule_arguments_count_samples() -> None:
    args = checked([*TINY, "--lr-warmup-fraction", "0.2", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "2"])
    kwargs = arguments.scheduler_kwargs_from_args(args)
    assert [kwargs[k] for k in ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps")] == [16, 80, 16, 80]
    args = checked([*without("--train-iters"), "--train-samples=100", "--lr-warmup-samples=10", "--lr-decay-samples=90"])
    kwargs = arguments.scheduler_kwargs_from_args(args)
    assert [kwargs[k] for k in ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps")] == [10, 90, None, 100]
    assert any("ends 10 samples before training does" in note for note in args.notes)
    assert not any("decay ends" in note for note in checked(TINY).notes)


@pytest.mark.parametrize(
    ("installed", "gpu", "reason"),
    [
        (False, True, "Transformer Engine is not installed (pip install 'transformer_engine[pytorch]>=2.4')"),
        (True, False, "there is no GPU for Transformer Engine"),
        (True, True, "Transformer Engine is used where it is asked for by name alone"),
    ],
)
def test_transformer_engine_falls_back_with_one_line(installed: bool, gpu: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_imports, "available", lambda name: installed)
    monkeypatch.setattr(device, "has_accelerator", lambda: gpu)
    args = checked(without("--transformer-impl"))
    assert (args.transformer_impl, args.requested_transformer_impl) == ("local", "transformer_engine")
    validate_args(args)
    (note,) = [note for note in args.notes if "local is used instead of transformer_engine" in note]
    assert note.startswith(f"WARNING: {reason}")
    assert checked(TINY).notes == []


def test_transformer_engine_is_used_where_it_can_be_and_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_imports, "available", lambda name: True)
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    args = checked([*without("--transformer-impl"), "--transformer-impl", "transformer_engine"])
    assert args.transformer_impl == args.requested_transformer_impl == "transformer_engine" and args.notes == []
    asked = [*without("--transformer-impl"), "--transformer-impl", "transformer_engine", "--apply-query-key-layer-scaling"]
    with pytest.raises(UsageError, match="--apply-query-key-layer-scaling: is not built for --transformer-impl transformer_engine"):
        checked(asked)
    with pytest.raises(UsageError, match="excludes --transformer-impl transformer_engine"):
        checked([*asked[:-1], "--cuda-graph-impl", "local"])


def test_script_defaults_give_way_to_flags() -> None:
    defaults = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "tokenizer_type": "NullTokenizer"}
    args = checked([*without("--tokenizer-type"), "--squared-relu", "--normalization", "LayerNorm"], defaults)
    assert (args.swiglu, args.squared_relu, args.normalization, args.position_embedding_type) == (False, True, "LayerNorm", "rope")
    assert checked(TINY, defaults).swiglu and checked(TINY, defaults).provenance["swiglu"] == "script"


def test_extra_arguments_and_unknown_ones() -> None:
    def add(parser):
        parser.add_argument("--mine", type=int, nargs=2, default=None)
        parser.add_argument("--kind", choices=["a", "b"], default="a")

    args = parse_args(add, argv=[*TINY, "--mine", "-3", "4"])
    assert args.mine == [-3, 4] and args.kind == "a"
    with pytest.raises(UsageError, match="--kind c: must be one of a, b"):
        parse_args(add, argv=[*TINY, "--kind", "c"])
    args = parse_args(ignore_unknown_args=True, argv=[*TINY, "--theirs", "3", "--theirs-too"])
    assert args.ignored_flags == ["--theirs", "--theirs-too"]


def test_checkpoint_arguments_have_the_documented_precedence(tmp_path: Path) -> None:
    saved = vars(checked([*TINY, "--swiglu", "--hidden-dropout", "0.3", "--vocab-size", "77"])).copy()
    shape = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings", "--vocab-size")
    line = [*without(*shape), "--use-checkpoint-args", "--load", str(tmp_path)]
    args = parse_args(argv=[*line, "--vocab-size", "99"])
    report = "\n".join(apply_checkpoint_args(args, saved))
    validate_args(args)
    assert (args.hidden_size, args.swiglu, args.hidden_dropout, args.ffn_hidden_size) == (64, True, 0.3, saved["ffn_hidden_size"])
    assert args.vocab_size == 99 and "--vocab-size 99 overrides the checkpoint's 77" in report and "hidden_size=64" in report
    args = parse_args(argv=[*line, "--hidden-size", "128"])
    with pytest.raises(UsageError, match=r"--hidden-size 128.*checkpoint's model has 64"):
        apply_checkpoint_args(args, saved)
    with pytest.raises(UsageError, match=r"--squared-relu.*|--disable-bias-linear.*"):
        apply_checkpoint_args(parse_args(argv=[*line, "--disable-bias-linear"]), saved)


def test_checkpoint_arguments_of_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    line = ["--use-checkpoint-args", "--load", str(tmp_path)]
    args = parse_args(argv=[*TINY, *line])
    assert apply_checkpoint_args(args, {}) == [f"no checkpoint in --load {tmp_path}: --use-checkpoint-args takes nothing from it"]
    validate_args(args)
    args = parse_args(argv=[*without("--num-layers"), *line])
    apply_checkpoint_args(args, {})
    with pytest.raises(UsageError, match=r"--num-layers: is required \(no checkpoint in --load"):
        validate_args(args)


def test_load_of_one_checkpoint_instead_of_their_folder(tmp_path: Path) -> None:
    one = tmp_path / "iter_0000012"
    one.mkdir()
    (found,) = problems_of([*TINY, "--load", f"{one}/"])
    assert "is one checkpoint" in found and f"(works: --load {tmp_path} --ckpt-step 12)" in found
    (found,) = problems_of([*TINY, "--load", str(one), "--ckpt-step", "12"])
    assert "is one checkpoint" in found
    (tmp_path / "release").mkdir()
    (found,) = problems_of([*TINY, "--load", str(tmp_path / "release")])
    assert f"(works: --load {tmp_path})" in found
    assert checked([*TINY, "--load", str(tmp_path), "--ckpt-step", "12", "--exit-on-missing-checkpoint"]).load == str(tmp_path)
    assert checked([*TINY, "--load", str(tmp_path / "not-there-yet")]).notes == []


def test_the_local_rank_of_the_line_counts_where_the_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import device
    from megatron.training import initialize

    chosen: list[int] = []
    monkeypatch.setattr(device, "set_device", chosen.append)
    monkeypatch.setattr(initialize.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize.parallel_state, "initialize_model_parallel", lambda **_: None)
    initialize.start_processes(parse_args(argv=[*TINY, "--local-rank", "3"]))
    monkeypatch.setenv("SLURM_LOCALID", "2")
    initialize.start_processes(parse_args(argv=[*TINY, "--local-rank", "3"]))
    monkeypatch.setenv("LOCAL_RANK", "1")
    initialize.start_processes(parse_args(argv=[*TINY, "--local-rank", "3"]))
    assert chosen == [3, 2, 1]


@pytest.mark.parametrize("values", ["-1 {0}", "0 {0} 0 {0}", "inf {0}", "1 {0} 1e400 {0}"])
def test_weights_of_a_blend(values: str, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"text{end}").touch()
    given = values.format(tmp_path / "text").split()
    (found,) = problems_of([*without("--mock-data"), "--data-path", *given])
    assert "weights must not be negative, nor all 0" in found
    assert checked([*without("--mock-data"), "--data-path", "0.5", given[1], "2", given[1]]).data_path is not None


def test_default_width_of_the_mlp() -> None:
    width = {flag: checked([*TINY, "--hidden-size", "4096", *flag]).ffn_hidden_size for flag in ((), ("--swiglu",), ("--quick-geglu",))}
    assert width == {(): 16384, ("--swiglu",): 10880, ("--quick-geglu",): 16384}


def as_yaml(line: list[str]) -> str:
    """The same line as a YAML file with nested headings, as the keys' spelling may vary."""
    actions = build_parser()._option_string_actions
    text = "model:\n"
    groups: list[list[str]] = []
    for word in line:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    for index, (flag, *values) in enumerate(groups):
        key = flag[2:].replace("-", "_") if index % 2 else flag[2:]
        known = actions.get(flag)
        if not values:
            value = "true" if known is None or known.nargs == 0 else "[]"
        else:
            value = json.dumps(values) if len(values) > 1 else json.dumps(values[0])
        text += f"  {key}: {value}\n"
    return text


@pytest.mark.parametrize(
    "flags", [row[0] for row in BAD + BAD_LAYOUT] + ["--swiglu", "--bf16 --lr 2e-4", "--disable-bias-linear", "--min-lr 1e-5"]
)
def test_yaml_and_command_line_get_the_same_verdict(flags: str, tmp_path: Path) -> None:
    line = changed(flags)
    # a mapping has each key once: the last value on the line counts
    last = {flag: None for flag in line if flag.startswith("--")}
    line = [w for flag in last for w in take_last(line, flag)]
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(line))

    def verdict(argv: list[str]) -> object:
        try:
            args = checked(argv)
        except UsageError as error:
            return sorted(str(problem).replace("--num_layers", "--num-layers") for problem in error.problems)
        return {k: v for k, v in vars(args).items() if k not in ("provenance", "yaml_cfg")}

    if "--num_layers" not in flags:  # YAML accepts that spelling
        assert verdict(["--yaml-cfg", str(path)]) == verdict(line)


def take_last(line: list[str], flag: str) -> list[str]:
    start = len(line) - 1 - line[::-1].index(flag)
    end = next((i for i in range(start + 1, len(line)) if line[i].startswith("--")), len(line))
    return line[start:end]


def test_yaml_by_dest_and_under_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("add_bias_linear: false\nbias_gelu_fusion: true\nlayernorm_zero_centered_gamma: true\nseed: 5\nload: null\nlr: 3e-4\n")
    args = checked([*without("--lr"), "--yaml-cfg", str(path), "--seed", "6"])
    assert (args.add_bias_linear, args.bias_gelu_fusion, args.layernorm_zero_centered_gamma) == (False, True, True)
    assert (args.seed, args.load, args.lr) == (6, None, 3e-4)
    assert was_given(args, "bias_gelu_fusion") and args.provenance["seed"] == "command line" and args.provenance["lr"] == "yaml"


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "a: &a {b: *a}", "\x00", "{" * 5000])
def test_a_broken_yaml_file_is_a_usage_error(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError):
        checked([*TINY, "--yaml-cfg", str(path)])


def run(line: list[str], code: str = "from megatron.training.arguments import parse_and_validate; parse_and_validate()", **env: str):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    root = Path(__file__).parents[3]
    after = "; import sys; assert 'torch' not in sys.modules; print('done')"
    return subprocess.run(
        [sys.executable, "-c", code + after, *line], capture_output=True, text=True, cwd=root, env=clean | env, timeout=60
    )


def test_exit_code_output_and_elastic_file(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    first = run([*TINY, "--fooo"], RANK="0", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(record))
    other = run([*TINY, "--fooo"], RANK="1", WORLD_SIZE="2")
    assert first.returncode == other.returncode == 2
    assert "--fooo" in first.stderr and "Traceback" not in first.stderr and other.stderr == ""
    message = json.loads(record.read_text())["message"]
    assert "--fooo" in message["message"] and int(message["extraInfo"]["timestamp"]) > 0


def test_the_command_line_costs_no_import_of_torch() -> None:
    assert run(TINY).stdout == "done\n"
    shown = run(["--help"])
    assert shown.returncode == 0 and "--num-layers" in shown.stdout
    code = "import megatron.training.arguments, megatron.training.check_config, sys; assert 'torch' not in sys.modules"
    assert run([], code).returncode == 0


def test_dry_run_reports_and_exits_with_0() -> None:
    shown = run([*TINY, "--check-config", "--check-config-world-size", "2"])
    assert shown.returncode == 0 and "done" not in shown.stdout
    assert "data 2" in shown.stdout and "2 micro batches" in shown.stdout and "the command line is valid" in shown.stdout


def test_parameter_count_of_a_known_model() -> None:
    line = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024 --padded-vocab-size 50257"
    args = checked([*TINY, *line.split()])
    total = 12 * model_size.layer_parameters(args) + (model_size.embedding_parameters(args) or 0)
    assert total == 124_439_808  # GPT-2 small, as published


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_real_command_lines_parse_or_name_what_is_missing(name: str) -> None:
    line, later = RECIPES[name]
    found = problems_of(line.split()) if later else []
    assert sorted(p.partition(": ")[0].split()[0] for p in found if "does not support yet" in p) == sorted(later)
    others = [p for p in found if "does not support yet" not in p and "does not divide a model that way yet" not in p]
    assert not others, others
    if not later:
        checked(line.split())


def test_junk_between_flags_is_never_a_crash() -> None:
    line = check_tokens(build_parser(), ["a", "-q", "--", "--=", "--lr=", "=", "--num-layers=--hidden-size"])
    assert line.problems


def test_nearest_divisor_and_multiples() -> None:
    assert checks.multiples(7, 4) == [4, 8] and checks.multiples(3, 4) == [4] and checks.nearest_divisor(12, 5) == 4


@pytest.mark.parametrize(
    ("flags", "world", "words"),
    [
        ("--sequence-parallel", 1, "--sequence-parallel has no effect"),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", 1, "--moe-aux-loss-coeff 0.1 has no effect"),
        ("--num-experts 4 --moe-token-drop-policy position", 1, "--moe-token-drop-policy position has no effect"),
        ("--num-experts 4 --moe-router-bias-update-rate 0.1", 1, "--moe-router-bias-update-rate 0.1 has no effect"),
        (
            "--num-experts 4 --moe-router-load-balancing-type global_aux_loss",
            1,
            "another training on another number of data-parallel ranks",
        ),
        ("--recompute-granularity selective --recompute-modules moe core_attn", 1, "--recompute-modules moe has no effect"),
    ],
)
def test_a_flag_that_another_makes_idle_is_accepted_and_said(flags: str, world: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    args = parse_args(argv=changed(flags))
    assert any(words in note for note in validate_args(args).notes)


@pytest.mark.parametrize(
    ("flags", "world", "works"),
    [
        ("--num-experts 4 --moe-input-jitter-eps 1.0", 1, "--moe-input-jitter-eps 0.5"),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
            2,
            "--num-layers 2",
        ),
    ],
)
def test_the_value_that_is_said_to_work_works(flags: str, world: int, works: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    (found,) = problems_of(changed(flags))
    assert found.endswith(f"(works: {works})")
    validate_args(parse_args(argv=[*changed(flags), *works.split()]))
