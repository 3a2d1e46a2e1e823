"""What a run writes: checkpoints, logs and profiles."""
# ruff: noqa: RUF009  (flag() makes a dataclass field)

from dataclasses import dataclass

from megatron.training.config.fields import flag


@dataclass
class CheckpointFlags:
    """Saving and loading."""

    save: str | None = flag(None, "Folder to save checkpoints to.")
    save_interval: int | None = flag(
        None,
        "Save every so many iterations. Default: at the end only.",
        unit="iterations",
        minimum=1,
        names=("--save-interval", "--persistent-save-interval"),
    )
    async_save: bool = flag(False, "Copy the state to host memory, and write it in another process while training goes on.")
    use_persistent_ckpt_worker: bool = flag(
        False, "Keep the process that writes.", no_effect="--async-save has one process for all saves of a run"
    )
    save_retain_interval: int | None = flag(
        None,
        "Remove older checkpoints from the --save folder but those of every so many iterations, a multiple of --save-interval. "
        "Default: none.",
        unit="iterations",
        minimum=1,
    )
    keep_last: int | None = flag(
        None,
        "Remove older checkpoints from the --save folder but the last so many, those that --save-retain-interval keeps and those with a "
        "file named keep. Default: none.",
        minimum=1,
        ours=True,
    )
    load: str | None = flag(None, "Folder to go on from; an empty or missing one starts anew.")
    pretrained_checkpoint: str | None = flag(
        None, "Folder to take the weights from, as --finetune does, while --load has no checkpoint: a run that is started again goes on."
    )
    ckpt_step: int | None = flag(None, "Iteration to load. Default: the last one.", unit="iterations", minimum=0)
    finetune: bool = flag(False, "Load the weights alone, and start at iteration 0.")
    no_load_optim: bool | None = flag(None, "Do not load the optimizer.")
    no_load_rng: bool | None = flag(None, "Do not load the random states.")
    no_save_optim: bool | None = flag(None, "Do not save the optimizer.")
    no_save_rng: bool | None = flag(None, "Do not save the random states.")
    use_checkpoint_args: bool = flag(False, "Take the model's and tokenizer's flags from the checkpoint where they were not given.")
    use_tokenizer_model_from_checkpoint_args: bool = flag(True, "With --use-checkpoint-args: the tokenizer's flags are not taken.")
    exit_on_missing_checkpoint: bool = flag(False, "A --load folder without a checkpoint is an error.")
    ckpt_format: str = flag(
        "torch_dist",
        "Layout of the files.",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
        built=("torch_dist", "torch"),
    )
    auto_detect_ckpt_format: bool = flag(
        False, "Read --load in whatever format it is, also where --ckpt-format is another: that one is written."
    )
    use_dist_ckpt_deprecated: bool = flag(
        False, "The torch_dist format.", names=("--use-dist-ckpt",), no_effect="--ckpt-format says the format"
    )
    dist_ckpt_format_deprecated: str | None = flag(
        None, "Old name of --ckpt-format.", names=("--dist-ckpt-format",), no_effect="--ckpt-format says the format"
    )


@dataclass
class LoggingFlags:
    """Console, metrics file, TensorBoard, wandb."""

    log_interval: int = flag(100, "A line every so many iterations.", unit="iterations", minimum=1)
    log_throughput: bool = flag(False, "Model TFLOP/s per GPU in the line.")
    log_params_norm: bool = flag(False, "The parameters' norm in the line.")
    log_num_zeros_in_grad: bool = flag(False, "The number of zeros in the gradients in the line.")
    log_progress: bool = flag(False, "Keep a progress.txt in the --save folder.")
    logging_level: int | None = flag(None, "Level of Python's logging, 10 = debug, 20 = info, 30 = warnings.", minimum=0)
    timing_log_level: int = flag(
        0,
        "0: the iteration alone; 1: its phases; 2: also timers of that level, which only a script starts.",
        choices=(0, 1, 2),  # type: ignore[arg-type]
    )
    timing_log_option: str = flag("minmax", "Over ranks: the largest, the extremes, or all.", choices=("max", "minmax", "all"))
    barrier_with_L1_time: bool = flag(
        True,
        "No barrier before the timers of level 1.",
        names=("--no-barrier-with-level-1-timing",),
        no_effect="timers never wait for other ranks",
    )
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard.")
    tensorboard_log_interval: int = flag(1, "Write scalars every so many iterations.", unit="iterations", minimum=1)
    tensorboard_queue_size: int = flag(1000, "Events kept before they are written.", minimum=1)
    log_timers_to_tensorboard: bool = flag(False, "Timers as scalars.")
    log_memory_to_tensorboard: bool = flag(False, "The allocator's statistics as scalars.")
    log_validation_ppl_to_tensorboard: bool = flag(False, "Validation perplexity as a scalar.")
    log_world_size_to_tensorboard: bool = flag(False, "The number of processes as a scalar.")
    log_loss_scale_to_tensorboard: bool = flag(True, "No loss scale as a scalar.")
    wandb_project: str | None = flag(None, "Project of wandb.")
    wandb_exp_name: str | None = flag(None, "Name of the run in wandb.")
    wandb_entity: str | None = flag(None, "Owner of the project in wandb.")
    wandb_save_dir: str | None = flag(None, "Folder for wandb's files. Default: `wandb` in the --save folder.")
    metrics_file: str | None = flag(None, "Append one JSON object per logged iteration, at full precision.", ours=True)


@dataclass
class ProfilingFlags:
    """Where the time goes."""

    profile: bool = flag(False, "Profile the steps after --profile-step-start; without --use-pytorch-profiler mark them for nsys.")
    profile_step_start: int = flag(10, "Iteration after which the profile begins.", unit="iterations", minimum=0)
    profile_step_end: int = flag(12, "Last iteration of the profile.", unit="iterations", minimum=1)
    profile_ranks: list[int] = flag((), "Ranks to profile. Default: 0.", nargs="+")
    use_pytorch_profiler: bool = flag(
        False, "torch's profiler: a trace and the time of each kernel, in the folder profile of --tensorboard-dir or --save, or here."
    )
    pytorch_profiler_collect_shapes: bool = flag(False, "Shapes in the trace.")
    pytorch_profiler_collect_callstack: bool = flag(False, "Stacks in the trace.")
