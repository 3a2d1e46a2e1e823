"""`pretrain`: from a script's five functions to a trained model. The loop is `train`; what happens around steps is in callbacks/."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import device, parallel_state
from megatron.core.enums import ModelType
from megatron.core.flops import model_flops
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.training import callbacks as cb
from megatron.training import errors
from megatron.training.arguments import finalize_args, parse_and_validate
from megatron.training.callbacks.sinks import open_tensorboard
from megatron.training.checkpointing import checkpoint_args, load_checkpoint, prepare_folder
from megatron.training.data import HeldOutSet, build_datasets, build_tokenizer_from_args, num_samples, train_iterations
from megatron.training.global_vars import get_tensorboard_writer, get_timers, set_global
from megatron.training.initialize import initialize_megatron
from megatron.training.model_setup import setup_model_and_optimizer
from megatron.training.phase import phase
from megatron.training.train_step import TrainingRun, train_step
from megatron.training.training_log import is_last_rank, print_rank_0


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
    args = parse_and_validate(extra_args_provider, args_defaults, checkpoint_args=checkpoint_args)
    with errors.reported():
        _pretrain(args, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func)


def _pretrain(
    args: argparse.Namespace, dataset_provider: Callable, model_provider: Callable, model_type: ModelType, forward_step_func: Callable
) -> None:
    started = device.Stopwatch()
    with phase("initialization"):
        finalize_args(args)
        initialize_megatron(parsed_args=args)
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
        batches, valid_sets, test_sets = build_datasets(args, dataset_provider, num_samples(args))
    run = TrainingRun(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step_func=forward_step_func,
        forward_backward_func=get_forward_backward_func(),
        state=state,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        train_iters=args.train_iters,
        flops_per_sample=flops_of_sample(args),
        sync_skips=bool(args.fp16),
    )
    with phase("opening the logs"):
        observers = build_callbacks(args, run, valid_sets)
    print_rank_0(f"setup took {started.elapsed():.1f} s; training from iteration {state.iteration + 1} of {run.train_iters}")
    try:
        if not args.skip_train and state.iteration < run.train_iters:
            train(run, batches, observers)
        elif not args.skip_train:
            print_rank_0(f"nothing to train: iteration {state.iteration} of {run.train_iters} is done (raise --train-iters to go on)")
        if run.stop_reason is None:
            final_evaluation(args, run, valid_sets, test_sets, observers)
    finally:
        for observer in observers:
            observer.close()


def flops_of_sample(args: argparse.Namespace) -> float:
    """FLOPs of one sample, forward and backward, as Megatron-LM's throughput counts them."""
    return model_flops(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        seq_length=args.seq_length,
        vocab_size=args.padded_vocab_size,
    )


def train(run: TrainingRun, batches: Iterator, observers: list[cb.Callback]) -> None:
    """The loop: steps until the last iteration, or until a callback sets `run.stop_reason`."""
    for chunk in run.model:
        chunk.train()
    for observer in observers:
        observer.on_train_start(run)
    while run.state.iteration < run.train_iters and run.stop_reason is None:
        record = train_step(run, batches)
        for observer in observers:
            observer.on_step_end(run, record)
    for observer in observers:
        observer.on_train_end(run)
    if run.stop_reason is not None:
        print_rank_0(f"exiting program at iteration {run.state.iteration}: {run.stop_reason}")


def build_callbacks(args: argparse.Namespace, run: TrainingRun, valid_sets: list[HeldOutSet]) -> list[cb.Callback]:
    """The run's observers, in the order in which each boundary calls them. The last reader of `args`."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    log = cb.IntervalLog(
        build_sinks(args) if is_last_rank() else [],
        interval=args.log_interval,
        group=group,
        dtype=args.params_dtype,
        stop_on_nan=args.check_for_nan_in_loss_and_grad,
        params_norm=args.log_params_norm,
        loss_scaling=bool(args.fp16),
        timers=get_timers(),
        timers_writer=get_tensorboard_writer() if args.log_timers_to_tensorboard else None,
    )
    observers: list[cb.Callback] = [cb.ProgressLine()] if is_last_rank() and sys.stdout.isatty() else []
    observers.append(log)
    if valid_sets:
        observers.append(make_evaluation(args, valid_sets, log))
    observers.append(
        cb.ExitConditions(
            signal_to_catch=args.exit_signal if args.exit_signal_handler else None,
            interval=args.exit_interval,
            minutes=args.exit_duration_in_mins,
        )
    )
    if args.save:
        observers.append(
            cb.SaveCheckpoints(
                args.save,
                args,
                interval=args.save_interval,
                with_optimizer=not args.no_save_optim,
                with_rng=not args.no_save_rng,
                log=log,
                keep_progress=args.log_progress,
            )
        )
    if args.manual_gc:
        observers.append(cb.GarbageCollection(args.manual_gc_interval))
    return observers


def build_sinks(args: argparse.Namespace) -> list[cb.LogSink]:
    """Where this rank, the one that logs, writes numbers."""
    sinks: list[cb.LogSink] = [cb.ConsoleSink(throughput=args.log_throughput)]
    if args.metrics_file:
        sinks.append(cb.MetricsFileSink(args.metrics_file))
    if args.tensorboard_dir:
        writer = open_tensorboard(args.tensorboard_dir, args.tensorboard_queue_size)
        set_global("tensorboard_writer", writer)
        sinks.append(
            cb.TensorBoardSink(
                writer,
                interval=args.tensorboard_log_interval,
                memory=args.log_memory_to_tensorboard,
                perplexities=args.log_validation_ppl_to_tensorboard,
                world_size=args.world_size if args.log_world_size_to_tensorboard else None,
                loss_scale=args.log_loss_scale_to_tensorboard,
            )
        )
    if args.wandb_project:
        sink = cb.WandbSink(
            project=args.wandb_project, name=args.wandb_exp_name, entity=args.wandb_entity, folder=args.wandb_save_dir, config=vars(args)
        )
        set_global("wandb_writer", sink.wandb)
        sinks.append(sink)
    if args.save:
        sinks.append(cb.PlotCurves(args.save))
    return sinks


def make_evaluation(args: argparse.Namespace, sets: list[HeldOutSet], log: cb.IntervalLog) -> cb.Evaluate:
    """An Evaluate over the given sets."""
    return cb.Evaluate(
        sets,
        interval=args.eval_interval,
        num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        global_batch_size=args.global_batch_size,
        counts_samples=not args.full_validation,
        group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tell=log.on_evaluation_end,
        log=log,
    )


def final_evaluation(
    args: argparse.Namespace, run: TrainingRun, valid_sets: list[HeldOutSet], test_sets: list[HeldOutSet], observers: list[cb.Callback]
) -> None:
    """After training: the validation sets once more, and the test sets."""
    log = next(observer for observer in observers if isinstance(observer, cb.IntervalLog))
    for evaluation in [observer for observer in observers if isinstance(observer, cb.Evaluate)]:
        evaluation.run_all(run, f"iteration {run.state.iteration} on validation set")
    if test_sets:
        evaluation = make_evaluation(args, test_sets, log)
        evaluation.counts_samples = False
        evaluation.set_kind = "test"
        evaluation.run_all(run, f"iteration {run.state.iteration} on test set")
