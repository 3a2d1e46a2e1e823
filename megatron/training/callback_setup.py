"""From flags to the callbacks and log sinks of a run."""

import argparse
import sys
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.transformer.moe.router import LOGGED_AS
from megatron.core.transformer.moe.settings import balance_coefficients, moe_layer_pattern
from megatron.training import callbacks as cb
from megatron.training.callbacks.expert_log import ExpertLog
from megatron.training.callbacks.sinks import open_tensorboard
from megatron.training.data import HeldOutSet
from megatron.training.global_vars import get_tensorboard_writer, get_timers, set_global
from megatron.training.training_log import is_last_rank


def build_callbacks(args: argparse.Namespace, validation: list[HeldOutSet], test: list[HeldOutSet]) -> list[cb.Callback]:
    """The run's callbacks, in the order of their calls: log, evaluate, decide to stop, save. The last reader of `args`."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = build_expert_log(args)
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
        experts=experts,
    )
    callbacks: list[cb.Callback] = [cb.ProgressLine()] if is_last_rank() and sys.stdout.isatty() else []
    callbacks += [] if experts is None else [experts]
    callbacks.append(log)
    callbacks.append(
        cb.Evaluate(
            validation,
            test,
            interval=args.eval_interval,
            num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            global_batch_size=args.global_batch_size,
            counts_samples=not args.full_validation,
            group=group,
            listeners=callbacks,
            log=log,
        )
    )
    callbacks.append(
        cb.ExitConditions(
            signal_to_catch=args.exit_signal if args.exit_signal_handler else None,
            interval=args.exit_interval,
            minutes=args.exit_duration_in_mins,
        )
    )
    if args.save:
        from megatron.training.callbacks.checkpoint import SaveCheckpoints  # here, as in training.py

        callbacks.append(
            SaveCheckpoints(
                args.save,
                args,
                interval=args.save_interval,
                with_optimizer=not args.no_save_optim,
                with_rng=not args.no_save_rng,
                log=log,
                keep_progress=args.log_progress,
                keep_last=args.keep_last,
                beside_training=args.async_save,
                retain_interval=args.save_retain_interval,
            )
        )
    if args.profile and args.rank in (args.profile_ranks or [0]):
        callbacks.append(build_profile(args))
    if args.manual_gc:
        callbacks.append(cb.GarbageCollection(args.manual_gc_interval))
    return callbacks


def build_profile(args: argparse.Namespace) -> cb.Profile:
    """--profile, on one of its ranks."""
    folder = Path(args.tensorboard_dir or args.save or ".") / "profile" if args.use_pytorch_profiler else None
    shapes, stacks = args.pytorch_profiler_collect_shapes, args.pytorch_profiler_collect_callstack
    return cb.Profile(args.profile_step_start, args.profile_step_end, folder, args.rank, shapes, stacks)


def build_expert_log(args: argparse.Namespace) -> ExpertLog | None:
    """What reads the routers' numbers, where the model has any."""
    pattern = [] if args.num_experts is None else moe_layer_pattern(args.moe_layer_freq, args.num_layers)
    pattern += pattern[-1:] * (args.mtp_num_layers or 0)  # layers for multi-token prediction are as the last one
    layers = [number for number, moe in enumerate(pattern, 1) if moe]
    if not layers:
        return None
    losses = [*balance_coefficients(args.moe_router_load_balancing_type, args.moe_aux_loss_coeff)]
    return ExpertLog(
        layers,
        args.num_experts,
        [LOGGED_AS[kind] for kind in (*losses, *(["z_loss"] if args.moe_z_loss_coeff else []))],
        same_tokens=1 if args.sequence_parallel else args.tensor_model_parallel_size,
        replicas=args.data_parallel_size,
        per_layer=args.moe_per_layer_logging,
    )


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
