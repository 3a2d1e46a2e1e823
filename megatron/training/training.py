"""`pretrain`: from a script's three functions to a trained model.

The loop is `train`; a step is in train_step.py, what happens around steps in callbacks/. Checkpoints are imported where they are used:
torch.distributed.checkpoint, which they need, takes half as long as `import torch`, and --help and a wrong command line do not wait for it.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import device
from megatron.core.enums import ModelType
from megatron.core.flops import LatentSizes, model_flops
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.cuda_graphs import FullCudaGraphWrapper
from megatron.core.transformer.moe.settings import moe_layer_pattern
from megatron.training import errors, failure
from megatron.training.arguments import finalize_args, parse_and_validate
from megatron.training.callback_setup import build_callbacks
from megatron.training.callbacks import Callback
from megatron.training.data import build_datasets, build_indices, build_tokenizer_from_args, train_iterations
from megatron.training.data_order import DataOrder
from megatron.training.global_vars import set_global
from megatron.training.initialize import initialize_megatron, set_timeout
from megatron.training.model_setup import setup_model_and_optimizer
from megatron.training.phase import outside, phase
from megatron.training.train_step import TrainingRun, train_step
from megatron.training.training_log import print_rank_0


def pretrain(
    train_valid_test_dataset_provider: Callable,
    model_provider: Callable,
    model_type: ModelType,
    forward_step_func: Callable,
    process_non_loss_data_func: Callable | None = None,
    extra_args_provider: Callable | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Train the model that the command line describes.

    train_valid_test_dataset_provider: [train, valid, test] sample counts -> three datasets (None where there is none).
    model_provider: (pre_process, post_process) -> the model, of which it may take fewer or more keywords.
    forward_step_func: (data iterator, model) -> (output, loss function), see pipeline_parallel.schedules.
    extra_args_provider: adds the script's own flags to the parser it gets. args_defaults: dest -> the script's default.

    Ends the process with 2 and a list of problems when the command line is wrong, with 1 and one line for what is the user's to mend
    (a missing file, a full disk), with 1 and a traceback for what is ours.
    """
    if process_non_loss_data_func is not None:
        raise ValueError("process_non_loss_data_func is not supported yet: leave it out")
    args = parse_and_validate(extra_args_provider, args_defaults, checkpoint_args=_checkpoint_args)
    with errors.reported():
        if args.build_index_only:
            return build_indices(args, train_valid_test_dataset_provider)
        _pretrain(args, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func)


def _checkpoint_args(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.training.checkpointing import checkpoint_args

    return checkpoint_args(args)


def _pretrain(
    args: argparse.Namespace, dataset_provider: Callable, model_provider: Callable, model_type: ModelType, forward_step_func: Callable
) -> None:
    from megatron.training.checkpointing import load_checkpoint, prepare_folder

    started = device.Stopwatch()
    with phase("initialization"):
        finalize_args(args)
        initialize_megatron(parsed_args=args)
        failure.start(60.0 * args.distributed_timeout_minutes)
        if args.save and not args.skip_train:
            prepare_folder(args.save)
        set_global("tokenizer", build_tokenizer_from_args(args))
        print_rank_0(
            f"using {args.world_size} process(es) on {device.device_name()}, {str(args.params_dtype).removeprefix('torch.')} parameters"
        )
    with phase("building the model"):
        model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type, args)
        state = load_checkpoint(args, model, optimizer, scheduler)
    args.iteration, args.consumed_train_samples = state.iteration, state.consumed_train_samples
    args.consumed_valid_samples = state.consumed_valid_samples
    update_num_microbatches(state.consumed_train_samples, consistency_check=False)
    args.train_iters = train_iterations(args)
    with phase("building the datasets"):
        state.data_order = state.data_order or DataOrder.of_this_run(args)
        batches, validation, test = build_datasets(args, dataset_provider, state.data_order)
    run = TrainingRun(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step_func=forward_step_func,
        forward_backward_func=_forward_backward_func(args),
        state=state,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        train_iters=args.train_iters,
        flops_per_sample=flops_of_sample(args),
        sync_skips=bool(args.fp16),
    )
    with phase("opening the logs"):
        callbacks = build_callbacks(args, validation, test)
    if args.distributed_timeout_seconds_after_init is not None:
        set_timeout(args.distributed_timeout_seconds_after_init)
    print_rank_0(f"setup took {started.elapsed():.1f} s")
    try:
        if not args.skip_train and state.iteration < run.train_iters:
            print_rank_0(f"training from iteration {state.iteration + 1} to {run.train_iters}")
            train(run, batches, callbacks)
        elif not args.skip_train:
            done = f"iteration {state.iteration} of {run.train_iters} is done"
            print_rank_0(f"training already complete: {done} (raise --train-iters to go on)")
        if run.stop_reason is None:
            for callback in callbacks:
                callback.on_run_complete(run)
    finally:
        for callback in callbacks:
            callback.close()


def _forward_backward_func(args: argparse.Namespace) -> Callable:
    function = get_forward_backward_func()
    return FullCudaGraphWrapper(function, args.cuda_graph_warmup_steps) if args.cuda_graph_impl == "full_iteration" else function


def flops_of_sample(args: argparse.Namespace) -> float:
    """FLOPs of one sample, forward and backward, as Megatron-LM's throughput counts them; the same in every layout."""
    return model_flops(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        seq_length=args.seq_length,
        vocab_size=args.softmax_vocab_size,
        latents=LatentSizes.of(args),
        mtp_num_layers=args.mtp_num_layers or 0,
        **_flops_of_experts(args),
    )


def _flops_of_experts(args: argparse.Namespace) -> dict[str, Any]:
    if args.num_experts is None:
        return {}
    return {
        "num_experts": args.num_experts,
        "moe_layers": sum(moe_layer_pattern(args.moe_layer_freq, args.num_layers)),
        "mtp_layers_are_moe": bool(moe_layer_pattern(args.moe_layer_freq, args.num_layers)[-1]),
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": args.moe_shared_expert_gate,
    }


def train(run: TrainingRun, batches: Iterator, callbacks: list[Callback]) -> None:
    """The loop: steps until the last iteration, or until a callback sets `run.stop_reason`."""
    outside("between steps")
    for chunk in run.model:
        chunk.train()
    for callback in callbacks:
        callback.on_train_start(run)
    while run.state.iteration < run.train_iters and run.stop_reason is None:
        record = train_step(run, batches)
        for callback in callbacks:
            callback.on_step_end(run, record)
    for callback in callbacks:
        callback.on_train_end(run)
    if run.stop_reason is not None:
        print_rank_0(f"exiting program at iteration {run.state.iteration}: {run.stop_reason}")
