"""From a checked command line to a process that can build a model: device, process groups, seeds, globals."""

import argparse
import importlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import device, parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.timers import Timers
from megatron.training import failure, global_vars, phase
from megatron.training.argument_utils import Problem, UsageError
from megatron.training.arguments import microbatches_calculator_args, parse_args, validate_args
from megatron.training.config.checks_layout import virtual_stages

PIPELINE_SEED_STRIDE = 100  # stages draw other dropout masks


def initialize_megatron(
    extra_args_provider: Callable | None = None,
    args_defaults: dict[str, Any] | None = None,
    parsed_args: argparse.Namespace | None = None,
) -> argparse.Namespace:
    """Parse and check the command line (unless `parsed_args` is given), then start everything that needs no model.

    Raises UsageError with every problem of the command line, before any process group exists.
    """
    args = parsed_args
    if args is None:
        args = parse_args(extra_args_provider)
        validate_args(args, args_defaults or {})
    global_vars.set_args(args)
    level = args.logging_level if args.logging_level is not None else os.environ.get("MEGATRON_LOGGING_LEVEL", "")
    if str(level).isdigit():
        logging.basicConfig(format="%(message)s")  # without a handler nothing below a warning is shown
        logging.getLogger().setLevel(int(level))
    start_processes(args)
    set_random_seed(args.seed, recordable=args.cuda_graph_impl != "none")
    init_num_microbatches_calculator(*microbatches_calculator_args(args))
    timers = Timers(args.timing_log_level, args.timing_log_option)
    global_vars.set_global("timers", timers)
    if args.timing_log_level > 0:
        phase.time_with(timers)
    return args


def _needs_a_gpu(args: argparse.Namespace) -> Iterator[Problem]:
    """What the line asks for that a CPU cannot do."""
    if args.cuda_graph_impl != "none":
        yield Problem("--cuda-graph-impl", args.cuda_graph_impl, "needs a GPU", "--cuda-graph-impl none")
    if args.attention_backend == "fused":
        yield Problem("--attention-backend", "fused", "is cuDNN's kernel, which needs a GPU", "--attention-backend auto")
    if args.attention_backend == "flash" and args.attention_dropout:
        rule = f"has no dropout on a CPU, and --attention-dropout is {args.attention_dropout:g}"
        yield Problem("--attention-backend", "flash", rule, "--attention-backend auto or --attention-dropout 0")


def start_processes(args: argparse.Namespace) -> None:
    """Choose the device and create the default process group and the model-parallel groups."""
    if args.deterministic_mode:
        device.set_deterministic()
    device.set_device(args.local_rank)
    if not device.has_accelerator() and (problems := list(_needs_a_gpu(args))):
        raise UsageError(problems)
    if args.cuda_graph_impl != "none":
        device.use_stream_of_its_own()
    if not device.has_accelerator() and "OMP_NUM_THREADS" not in os.environ and args.world_size == 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    if not dist.is_initialized():
        if args.world_size > 1:
            # Its functions take the default group of the moment of this import as their default; imported later, as checkpoints do, they
            # would keep the group and its threads alive to the end of the process (see errors._shut_down).
            importlib.import_module("torch.distributed.nn.functional")
        store = dist.HashStore() if args.world_size == 1 else None  # one process meets nobody: no port is opened
        dist.init_process_group(
            backend="gloo" if args.distributed_backend == "gloo" else device.distributed_backend(),
            store=store,
            rank=args.rank,
            world_size=args.world_size,
            timeout=failure.timeout_of_groups(60.0 * args.distributed_timeout_minutes),
        )
    timeout = failure.timeout_of_groups(60.0 * args.distributed_timeout_minutes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(args),
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def set_timeout(seconds: float) -> None:
    """--distributed-timeout-seconds-after-init: from now on a collective may take so long, in every group of this rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    groups = [group for found in parallel_state.all_groups().values() for group in (found if isinstance(found, list) else [found])]
    for group in {dist.group.WORLD, *groups} - {None}:
        dist.distributed_c10d._set_pg_timeout(failure.timeout_of_groups(seconds), group)
    if (watch := failure.watch()) is not None:
        watch.timeout = seconds


def set_random_seed(seed: int, recordable: bool = False) -> None:
    """Seed every generator, with `recordable` so that CUDA graphs can draw from them.

    Data-parallel ranks share seeds; pipeline stages do not, nor, inside the tracker, tensor-parallel ranks.
    """
    seed = seed + PIPELINE_SEED_STRIDE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=recordable)
