"""The run: batch, length, ways to end it, evaluation, determinism."""
# ruff: noqa: RUF009  (flag() makes a dataclass field)

import signal
from dataclasses import dataclass

from megatron.core.context_parallel.combinations import COMM_TYPES
from megatron.training.config.fields import flag


@dataclass
class BatchFlags:
    """Samples per step."""

    micro_batch_size: int | None = flag(None, "Samples of one forward pass on one data-parallel rank.", unit="samples", minimum=1)
    global_batch_size: int | None = flag(
        None, "Samples of one optimizer step. Default: micro batch size x data-parallel size.", unit="samples", minimum=1
    )
    rampup_batch_size: list[int] | None = flag(
        None,
        "Start size, increment, and the samples over which the global batch grows to --global-batch-size; needs --train-samples.",
        unit="samples",
        nargs=3,
    )
    step_batch_size_schedule: str | None = flag(
        None,
        "TOKENS:SIZE ...: the global batch size in samples from so many consumed tokens on, such as '0:384 200B:768' (K, M, B and T are "
        "powers of 1000; tokens are samples x --seq-length). The last is --global-batch-size; needs --train-samples.",
        unit="tokens and samples",
    )


@dataclass
class TrainingFlags:
    """Length of the run and what ends it."""

    train_iters: int | None = flag(None, "Length of training.", unit="iterations", minimum=0)
    train_samples: int | None = flag(None, "Length of training, instead of --train-iters.", unit="samples", minimum=1)
    seed: int = flag(1234, "Seed of weights, dropout and data order.", minimum=1)
    skip_train: bool = flag(False, "Evaluate only.")
    exit_interval: int | None = flag(None, "Save and exit when the iteration is a multiple of this.", unit="iterations", minimum=1)
    exit_duration_in_mins: int | None = flag(None, "Save and exit after this time; 0 = never.", unit="minutes", minimum=0)
    exit_signal_handler: bool = flag(False, "Save and exit when --exit-signal arrives.")
    exit_signal: signal.Signals = flag(
        signal.SIGTERM,
        "The signal that --exit-signal-handler waits for.",
        type=signal.Signals,
        choices=tuple(s.name for s in signal.Signals),
    )
    calculate_per_token_loss: bool = flag(False, "Normalise by the valid tokens of the global batch, not per micro batch.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Go on after NaN or Inf in loss or gradients, and count such steps, instead of stopping; either way they change no weight.",
        names=("--no-check-for-nan-in-loss-and-grad",),
    )
    deterministic_mode: bool = flag(False, "Two runs on one layout are equal to the bit: kernels that are not are left out or refused.")
    manual_gc: bool = flag(False, "Python's garbage collector runs only when told.")
    manual_gc_interval: int = flag(0, "Collect every so many iterations, with --manual-gc; 0 = never.", unit="iterations", minimum=0)
    manual_gc_eval: bool = flag(True, "No collection around evaluation.", no_effect="none is made there")
    yaml_cfg: str | None = flag(None, "Read flags from this YAML file (keys as the flags, or nested one level); the command line wins.")
    check_config: bool = flag(False, "Check the command line, print the resolved configuration and exit.", ours=True)
    check_config_world_size: int | None = flag(
        None, "Number of processes that --check-config assumes. Default: WORLD_SIZE, else 1.", minimum=1, ours=True
    )


@dataclass
class EvaluationFlags:
    """Validation and test."""

    eval_iters: int = flag(100, "Batches of each evaluation; 0 = none.", unit="iterations", minimum=0)
    eval_interval: int | None = flag(None, "Evaluate every so many iterations. Default: at the end only.", unit="iterations", minimum=1)
    full_validation: bool = flag(False, "Each evaluation goes over the whole validation and test sets instead of --eval-iters batches.")
    multiple_validation_sets: bool = flag(False, "A loss of its own for each corpus of the validation split.")
    validation_set_names: list[str] | None = flag(None, "Names of those corpora in the logs. Default: their files' names.", nargs="+")


@dataclass
class DistributedFlags:
    """How processes meet."""

    distributed_backend: str = flag("nccl", "Communication of GPU tensors; without a GPU gloo is used.", choices=("nccl", "gloo"))
    overlap_grad_reduce: bool = flag(False, "Reduce gradients over data-parallel ranks while the backward pass still runs.")
    use_tp_pp_dp_mapping: bool = flag(False, "Number ranks by tensor, pipeline, then data parallelism, instead of data before pipeline.")
    use_distributed_optimizer: bool = flag(
        False, "Each data-parallel rank keeps the optimizer's state of, and updates, its share of the parameters alone."
    )
    overlap_param_gather: bool = flag(
        False,
        "With --use-distributed-optimizer and --overlap-grad-reduce: each bucket's parameters are gathered, once updated, while later ones "
        "are updated and the forward pass runs.",
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "With --use-distributed-optimizer: the state is spread over the ranks of one of so many groups; gradients are reduced within a "
        "group, then over the groups.",
        minimum=1,
    )
    ddp_bucket_size: int | None = flag(
        None,
        "Gradients reduced together, at least. Default: 40 million, or 1 million x data-parallel size.",
        unit="elements",
        minimum=1,
    )
    ddp_num_buckets: int | None = flag(None, "Buckets of gradients, instead of --ddp-bucket-size.", minimum=1)
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False, "Buckets of a multiple of 65536 elements, which NCCL moves fastest.")
    ddp_average_in_collective: bool = flag(
        False, "NCCL divides gradients by the data-parallel size (it does for powers of two, to the same bits); others divide, then sum."
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(
        False, "With --use-distributed-optimizer and 16-bit gradients: ranks exchange gradients, and add them up in fp32."
    )
    gradient_reduce_div_fusion: bool = flag(
        True,
        "Divide gradients in a pass of its own.",
        names=("--no-gradient-reduce-div-fusion",),
        no_effect="a bucket is divided in one pass before its reduction, or by NCCL",
    )
    align_grad_reduce: bool = flag(
        True,
        "Pipeline stages reduce gradients each for itself.",
        no_effect="every stage reduces a bucket when it is full, and the rest after its last backward",
    )
    align_param_gather: bool = flag(
        True,
        "Pipeline stages gather parameters each for itself.",
        names=("--no-align-param-gather",),
        no_effect="every stage gathers when its update is done",
    )
    distributed_timeout_minutes: int = flag(10, "After it a collective that hangs is an error.", unit="minutes", minimum=1)
    distributed_timeout_seconds_after_init: int | None = flag(
        None, "The same once the model, the data and the logs are there, when collectives wait for no slow file.", unit="seconds", minimum=1
    )
    local_rank: int = flag(
        0, "Rank on this host, by old launchers: it chooses the GPU. LOCAL_RANK or SLURM_LOCALID of the environment wins.", minimum=0
    )


@dataclass
class ParallelismFlags:
    """How the model is divided over processes."""

    tensor_model_parallel_size: int = flag(1, "Ranks that share each layer.", minimum=1)
    pipeline_model_parallel_size: int = flag(1, "Stages that share the layers.", minimum=1)
    context_parallel_size: int = flag(1, "Ranks that share each sequence.", minimum=1)
    cp_comm_type: list[str] = flag(
        ("p2p",),
        f"How ranks that share a sequence attend, for all layers or one for each: {', '.join(COMM_TYPES)}.",
        nargs="+",
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, "With a2a+p2p: ranks that exchange heads, and ranks of the ring.", nargs="+"
    )
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts.", minimum=1)
    expert_tensor_parallel_size: int | None = flag(None, "Ranks that share one expert. Default: the tensor size.", minimum=1)
    sequence_parallel: bool = flag(False, "Norms and dropout of a tensor-parallel group split the sequence.")
    tp_comm_overlap: bool = flag(
        False,
        "With --sequence-parallel: tokens are gathered and scattered behind the matrix products of the linears, by copy engines where "
        "GPUs share memory, else in chunks.",
    )
    tp_comm_overlap_ag: bool = flag(
        True,
        "With --tp-comm-overlap: gather before the product.",
        names=("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag"),
    )
    tp_comm_overlap_rs: bool = flag(
        True,
        "With --tp-comm-overlap: scatter after the product.",
        names=("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs"),
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "With --tp-comm-overlap: scatter the gradients of inputs behind their own product too, not only behind that of the weights."
    )
    cp_comm_overlap: bool = flag(
        False,
        "With --cp-comm-type p2p and a2a+p2p: copy engines send round the ring where GPUs share memory, not NCCL's kernels, which take "
        "multiprocessors from the attention that they hide behind.",
        ours=True,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "Layers of one virtual stage.", minimum=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "Virtual stages of one rank.", minimum=1)
    decoder_first_pipeline_num_layers: int | None = flag(None, "Layers of the first stage, for uneven splits.", minimum=1)
    decoder_last_pipeline_num_layers: int | None = flag(None, "Layers of the last stage, for uneven splits.", minimum=1)
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "The split in letters, a | between stages: E embedding, t layer, L loss, t*3 and (tt|)*4 repeat; 'Et*3|(tt|)*4L' is 6 stages. "
        "Several times as many stages as --pipeline-model-parallel-size are virtual stages.",
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "The embedding counts as a layer in the split.")
    account_for_loss_in_pipeline_split: bool = flag(False, "The loss counts as a layer in the split.")
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "Micro batches that pass a virtual stage before the next one's turn. Default: the pipeline size.",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        minimum=1,
    )
    overlap_p2p_comm: bool = flag(True, "Pipeline stages compute while they send and receive.", names=("--no-overlap-p2p-communication",))
    overlap_p2p_comm_warmup_flush: bool = flag(
        False,
        "Overlap communication of pipeline stages in warm-up and flush too.",
        names=("--overlap-p2p-communication-warmup-flush",),
        no_effect="they are overlapped as the rest of a step is",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "Order of a pipeline's micro batches; 1f1b is interleaved with virtual stages, zero-bubble puts off gradients of weights.",
        choices=("1f1b", "zero-bubble"),
        ours=True,
    )
