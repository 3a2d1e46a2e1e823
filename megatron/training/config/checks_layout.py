"""What must hold between the parallel sizes, the number of processes and the model. Only arithmetic: no process group, no torch."""

from collections.abc import Iterator
from math import lcm

from megatron.core.context_parallel.combinations import context_parallel_problems
from megatron.core.optional_imports import available
from megatron.core.tokenizers.build import WITH_CHAT_TEMPLATE
from megatron.core.transformer.attention_masks import backend_problem, window_problems
from megatron.core.transformer.pipeline_parallel_layer_layout import layout_problems, pipeline_layout
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import Args, batch_size_steps, broken_rule, multiples, name_of, nearest_divisor, problem

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def model_parallel_size(args: Args) -> int:
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def sensible(args: Args) -> bool:
    """Whether the sizes can be computed with; what is wrong with them is a matter of ranges."""
    return all(getattr(args, dest) >= 1 for dest in SIZES) and (args.expert_tensor_parallel_size or 1) >= 1


def data_parallel_size(args: Args) -> int | None:
    """Replicas of the model, None when the processes do not divide into them."""
    if not sensible(args) or args.world_size % model_parallel_size(args):
        return None
    return args.world_size // model_parallel_size(args)


def smallest_world_size(args: Args) -> int:
    """Processes of the smallest job with this layout."""
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return lcm(model_parallel_size(args) * instances, experts * args.pipeline_model_parallel_size * instances)


def virtual_stages(args: Args) -> int | None:
    """Model chunks of a pipeline rank under the interleaved schedule, None without it (one chunk is no interleaving)."""
    if args.pipeline_model_parallel_layout is not None:
        try:
            layout = pipeline_layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
        except (ValueError, ZeroDivisionError):  # a problem of check_pipeline
            return None
        return None if layout.virtual_pipeline_model_parallel_size == 1 else layout.virtual_pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank
    per_stage, stages = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    if chunks is None and per_stage is not None and per_stage >= 1 and stages >= 1 and args.num_layers:
        layers = args.num_layers + bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
        chunks = layers // stages // per_stage
    return None if chunks is None or chunks <= 1 else chunks


def check_processes(args: Args) -> Iterator[Problem]:
    if not sensible(args):
        return
    world, size = args.world_size, model_parallel_size(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    product = f"tensor {tensor} x pipeline {pipeline} x context {args.context_parallel_size}"
    if world % size:
        dest = next(d for d in SIZES[:3] if getattr(args, d) > 1)
        counts = " or ".join(map(str, multiples(world, size)))
        works = f"{counts} processes, or {name_of(dest)} {nearest_divisor(world, getattr(args, dest))}"
        yield Problem(
            name_of(dest), str(getattr(args, dest)), f"{world} processes are not a multiple of the model's {product} = {size}", works
        )
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tensor
    part = expert * expert_tensor * pipeline
    if (expert > 1 or args.expert_tensor_parallel_size) and world % part and not world % size:
        rule = f"{world} processes are not a multiple of expert {expert} x expert tensor {expert_tensor} x pipeline {pipeline} = {part}"
        yield problem(args, "expert_model_parallel_size", rule, nearest_divisor(max(1, world // (expert_tensor * pipeline)), expert))


def check_tensor(args: Args) -> Iterator[Problem]:
    tensor = args.tensor_model_parallel_size
    if args.tp_comm_overlap and not args.sequence_parallel:
        rule = "needs --sequence-parallel (with --tensor-model-parallel-size above 1): it hides the gathering and scattering of tokens"
        yield problem(args, "tp_comm_overlap", rule, "leave it out" if tensor == 1 else "--sequence-parallel, or leave it out")
    if args.tp_comm_overlap_rs_dgrad and not args.tp_comm_overlap:
        yield problem(args, "tp_comm_overlap_rs_dgrad", "is a part of --tp-comm-overlap, which is off", "--tp-comm-overlap")
    if tensor <= 1:
        return
    divided = [("num_attention_heads", args.num_attention_heads), ("ffn_hidden_size", args.ffn_hidden_size)]
    if args.group_query_attention:
        divided.append(("num_query_groups", args.num_query_groups))
    if args.sequence_parallel:
        divided.append(("seq_length", args.seq_length))
    for dest, count in divided:
        if count and count % tensor:
            rule = f"must be a multiple of --tensor-model-parallel-size {tensor}"
            works = f"{multiples(count, tensor)[-1]}, or --tensor-model-parallel-size {nearest_divisor(count, tensor)}"
            yield Problem(name_of(dest), str(count), rule, f"{name_of(dest)} {works}")


def packs_documents(args: Args) -> bool:
    """Whether --reset-attention-mask goes by packed attention, over documents that lie behind each other, without a mask [s, s].

    Context-parallel ranks cut documents only at multiples of their number; pipeline stages, and balance losses of one sequence, count on
    rows of --seq-length tokens. There the mask remains.
    """
    one_row = args.micro_batch_size == 1 or (args.pipeline_model_parallel_size == 1 and not args.num_experts)
    return bool(args.reset_attention_mask) and args.context_parallel_size == 1 and one_row and not args.sft


def needs_square_mask(args: Args) -> bool:
    return bool(args.reset_attention_mask) and not packs_documents(args) and not args.sft


def check_sft(args: Args) -> Iterator[Problem]:
    """--sft: what packs conversations, and what does not yet."""
    if not args.sft:
        return
    if args.tokenizer_type is not None and args.tokenizer_type not in WITH_CHAT_TEMPLATE:
        yield problem(args, "tokenizer_type", "has no chat template, which --sft writes conversations by", "SFTTokenizer")
    if args.micro_batch_size and args.micro_batch_size > 1 and (args.pipeline_model_parallel_size > 1 or args.num_experts):
        reason = "pipeline stages" if args.pipeline_model_parallel_size > 1 else "experts' balance losses"
        yield problem(args, "micro_batch_size", f"--sft packs conversations into one row, and {reason} count on rows of --seq-length", 1)
    for dest in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(args, dest):
            yield problem(args, dest, "has no meaning with --sft: conversations never see each other", "leave it out")


def check_context(args: Args) -> Iterator[Problem]:
    ranks, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    if ranks > 1 and args.seq_length and args.seq_length % (2 * ranks):
        rule = f"must be a multiple of 2 x --context-parallel-size {ranks} = {2 * ranks}, to balance causal attention"
        yield problem(args, "seq_length", rule, multiples(args.seq_length, 2 * ranks)[-1])
    elif ranks > 1 and args.sequence_parallel and args.seq_length and tensor > 1 and args.seq_length % (ranks * tensor):
        unit = lcm(2 * ranks, ranks * tensor)
        rule = f"--sequence-parallel divides the {args.seq_length // ranks} tokens of a context-parallel rank by {tensor}"
        yield problem(args, "seq_length", rule, multiples(args.seq_length, unit)[-1])
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    found = context_parallel_problems(
        ranks,
        args.cp_comm_type,
        args.hierarchical_context_parallel_sizes,
        num_layers=args.num_layers,
        groups=groups,
        tp_size=tensor,
        attention_dropout=args.attention_dropout,
        window=args.window_size is not None,
        attention_mask=needs_square_mask(args),
        overlap=args.cp_comm_overlap,
    )
    for broken in found:
        yield broken_rule(args, broken)


def check_masks(args: Args) -> Iterator[Problem]:
    """Every mask that is asked for is honoured by the attention that is asked for."""
    for broken in window_problems(args.window_size, args.window_attn_skip_freq, args.num_layers):
        yield broken_rule(args, broken)
    windows = available("flash_attn_interface") and args.context_parallel_size == 1 and not args.attention_dropout
    reason = backend_problem(
        args.attention_backend,
        window=args.window_size is not None,
        attention_mask=needs_square_mask(args),
        windows=windows and (args.bf16 or args.fp16),
    )
    if reason:
        yield problem(args, "attention_backend", reason, "auto")


def check_pipeline(args: Args) -> Iterator[Problem]:
    """Every layer must find a stage: what the split leaves over is refused, never dropped."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    virtual = [d for d in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank") if getattr(args, d) is not None]
    if stages == 1:
        if args.pipeline_schedule != "1f1b":
            yield problem(args, "pipeline_schedule", "needs --pipeline-model-parallel-size above 1", "leave it out")
        for dest in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout", *virtual):
            if getattr(args, dest) is not None:
                yield problem(args, dest, "needs --pipeline-model-parallel-size above 1: one stage has all layers", "leave it out")
        return
    if args.pipeline_schedule == "zero-bubble" and virtual:
        yield problem(args, virtual[0], "excludes --pipeline-schedule zero-bubble: it has one virtual stage a rank", "leave it out")
    if args.pipeline_schedule == "zero-bubble" and not args.gradient_accumulation_fusion:
        rule = "needs gradient accumulation fusion: only those gradients of weights can be put off"
        yield problem(args, "pipeline_schedule", rule, "leave --no-gradient-accumulation-fusion out")
    if args.pipeline_model_parallel_layout is not None:
        yield from _check_layout(args, virtual)
        return
    if len(virtual) == 2:
        yield problem(args, virtual[0], f"excludes {name_of(virtual[1])}: give one of them", name_of(virtual[1]))
    if not layers or stages < 1:
        return
    uneven = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    accounted = bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
    if (first is not None or last is not None) and accounted:
        dest = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
        rule = "excludes --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        yield problem(args, dest, rule, "leave it out")
        return
    left = layers + accounted - (first or 0) - (last or 0)
    middle = stages - (first is not None) - (last is not None)
    # with two stages and both ends given nothing is left for a middle
    if (middle and (left < middle or left % middle)) or (not middle and left):
        what = f"{layers} layers" + (f" and {accounted} more that count as one" if accounted else "")
        ends = f" after {first or 0} in the first and {last or 0} in the last stage" if first is not None or last is not None else ""
        rule = f"{what} do not divide over --pipeline-model-parallel-size {stages}{ends}; uneven splits are given by {uneven}"
        fitting = [n for n in multiples(left, middle) if n >= middle] if middle else [0]
        works = " or ".join(f"--num-layers {layers - left + n}" for n in fitting)
        yield problem(args, "num_layers", rule, works)
        return
    if first is not None or last is not None:
        if virtual:
            yield from _check_virtual_uneven(args, first, last, left // middle if middle else None)
        return
    yield from _check_virtual(args, left // middle if middle else 0, virtual)


def _check_layout(args: Args, virtual: list[str]) -> Iterator[Problem]:
    """--pipeline-model-parallel-layout says the whole split, virtual stages included."""
    uneven = ["decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"]
    accounted = ["account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"]
    for dest in [d for d in uneven if getattr(args, d) is not None] + [d for d in accounted if getattr(args, d)] + virtual:
        yield problem(args, dest, "excludes --pipeline-model-parallel-layout, which says the whole split", "leave it out")
    if args.pipeline_model_parallel_size < 1:
        return
    found = layout_problems(
        args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size, None, args.num_layers, args.mtp_num_layers
    )
    for text in found:
        yield problem(args, "pipeline_model_parallel_layout", text)
    chunks = 1 if found else virtual_stages(args) or 1
    if chunks > 1 and args.pipeline_schedule == "zero-bubble":
        rule = f"gives {chunks} virtual stages a rank: --pipeline-schedule zero-bubble has one"
        yield problem(args, "pipeline_model_parallel_layout", rule)
    yield from _check_groups(args, chunks)


def _check_virtual_uneven(args: Args, first: int | None, last: int | None, per_rank: int | None) -> Iterator[Problem]:
    """Virtual stages of an uneven split are given by their number, which divides the layers of each rank."""
    if args.num_virtual_stages_per_pipeline_rank is None:
        rule = "does not say how an uneven split divides; give --num-virtual-stages-per-pipeline-rank"
        yield problem(args, "num_layers_per_virtual_pipeline_stage", rule, "leave it out")
        return
    chunks = args.num_virtual_stages_per_pipeline_rank
    for count in (first, per_rank, last):
        if chunks >= 1 and count is not None and count % chunks:
            rule = f"must divide the {count} layers of a pipeline rank"
            yield problem(args, "num_virtual_stages_per_pipeline_rank", rule, nearest_divisor(count, chunks))
            return
    yield from _check_groups(args, chunks)


def _check_virtual(args: Args, per_rank: int, virtual: list[str]) -> Iterator[Problem]:
    """Virtual stages divide a rank's layers, and their schedule wants micro batches in groups of the pipeline size."""
    if len(virtual) != 1 or per_rank == 0:
        return
    dest, count = virtual[0], getattr(args, virtual[0])
    if count < 1:
        return
    if per_rank % count:
        yield problem(args, dest, f"must divide the {per_rank} layers of a pipeline rank", nearest_divisor(per_rank, count))
        return
    chunks = per_rank // count if dest == "num_layers_per_virtual_pipeline_stage" else count
    yield from _check_groups(args, chunks)


def check_pipeline_communication(args: Args) -> Iterator[Problem]:
    if args.overlap_p2p_comm_warmup_flush and not args.overlap_p2p_comm:
        yield problem(args, "overlap_p2p_comm_warmup_flush", "excludes --no-overlap-p2p-communication", "leave one of them out")
    size, stages = args.microbatch_group_size_per_vp_stage, args.pipeline_model_parallel_size
    if size is None:
        return
    dest = "microbatch_group_size_per_vp_stage"
    if virtual_stages(args) is None:
        rule = "needs virtual stages: --num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage"
        yield problem(args, dest, rule, "leave it out")
    elif size < stages:
        yield problem(args, dest, f"must be at least --pipeline-model-parallel-size {stages}", stages)


def _check_groups(args: Args, chunks: int) -> Iterator[Problem]:
    """The interleaved schedule takes micro batches in groups of the pipeline's size, or of a size given, with no small one at the end."""
    if args.microbatch_group_size_per_vp_stage is not None:
        yield from _check_given_groups(args, chunks)
        return
    micro, total, replicas = args.micro_batch_size, args.global_batch_size, args.data_parallel_size
    stages = args.pipeline_model_parallel_size
    if chunks < 2 or not micro or not total or not replicas or total % (micro * replicas):
        return
    batches = total // (micro * replicas)
    if batches % stages:
        works = " or ".join(f"--global-batch-size {n * micro * replicas}" for n in multiples(batches, stages))
        rule = (
            f"gives {batches} micro batches (--micro-batch-size {micro}, data-parallel size {replicas}); {chunks} virtual stages on each "
            f"of {stages} pipeline ranks need a multiple of {stages}, so a global batch that is a multiple of {stages * micro * replicas}"
        )
        yield problem(args, "global_batch_size", rule, works)
    for _, size in batch_size_steps(args) or ():
        if size % (micro * replicas) == 0 and size // (micro * replicas) % stages:
            rule = f"the size {size} must be a multiple of {stages * micro * replicas}: {chunks} virtual stages take {stages} micro batches"
            yield problem(args, "step_batch_size_schedule", f"{rule} at a time")
            break
    if batches % stages == 0 and args.rampup_batch_size is not None and len(args.rampup_batch_size) == 3:
        group = stages * micro * replicas
        start, increment, samples = args.rampup_batch_size
        if start > 0 and increment > 0 and (start % group or increment % group):
            rule = f"start and increment must be multiples of {group}: {chunks} virtual stages take {stages} micro batches at a time"
            first, step = (multiples(number, group)[-1] for number in (start, increment))
            yield problem(args, "rampup_batch_size", rule, f"--rampup-batch-size {first} {step} {samples}")


def _check_given_groups(args: Args, chunks: int) -> Iterator[Problem]:
    size, stages = args.microbatch_group_size_per_vp_stage, args.pipeline_model_parallel_size
    micro, total, replicas = args.micro_batch_size, args.global_batch_size, args.data_parallel_size
    if chunks < 2 or size < stages or not micro or not total or not replicas or total % (micro * replicas):
        return
    totals = [total]
    if args.rampup_batch_size is not None and len(args.rampup_batch_size) == 3 and min(args.rampup_batch_size[:2]) > 0:
        totals = [*range(args.rampup_batch_size[0], total, args.rampup_batch_size[1]), total]
    for samples in totals:
        batches = samples // (micro * replicas)
        if 0 < batches % size < stages:
            rule = (
                f"leaves a last group of {batches % size} of the {batches} micro batches of {samples} samples (--micro-batch-size {micro}, "
                f"data-parallel size {replicas}); {stages} pipeline ranks with virtual stages need at least {stages} in it"
            )
            yield problem(args, "microbatch_group_size_per_vp_stage", rule, "leave it out" if batches % stages == 0 else batches)
            return


def check_instances(args: Args) -> Iterator[Problem]:
    """Optimizer instances divide the data-parallel ranks, of dense layers and of experts."""
    count = args.num_distributed_optimizer_instances
    if count <= 1:
        return
    dest = "num_distributed_optimizer_instances"
    if not args.use_distributed_optimizer:
        yield problem(args, dest, "needs --use-distributed-optimizer: the instances are its own", "--use-distributed-optimizer")
    replicas = data_parallel_size(args)
    if replicas is None:
        return
    if replicas % count:
        yield problem(args, dest, f"must divide the data-parallel size {replicas}", nearest_divisor(replicas, count))
        return
    part = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    expert_replicas, rest = divmod(args.world_size, part * args.pipeline_model_parallel_size)
    if not rest and expert_replicas % count:
        rule = f"must divide the {expert_replicas} ranks that hold the same experts too"
        yield problem(args, dest, rule, nearest_divisor(expert_replicas, count))


def check_rank_order(args: Args) -> Iterator[Problem]:
    """With pipeline stages inside of data-parallel ranks dense layers and experts must divide a stage into equally large parts."""
    if not args.use_tp_pp_dp_mapping or not sensible(args) or args.pipeline_model_parallel_size == 1:
        return
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = expert_tensor * args.expert_model_parallel_size
    has_experts = args.expert_model_parallel_size > 1 or expert_tensor != args.tensor_model_parallel_size
    if has_experts and dense != experts:
        rule = (
            f"gives dense layers (tensor {args.tensor_model_parallel_size} x context {args.context_parallel_size} = {dense}) and experts "
            f"(tensor {expert_tensor} x expert {args.expert_model_parallel_size} = {experts}) different pipelines, unless both are equal"
        )
        yield problem(args, "use_tp_pp_dp_mapping", rule, "leave it out")


RULES = (
    check_processes,
    check_tensor,
    check_context,
    check_masks,
    check_sft,
    check_pipeline,
    check_pipeline_communication,
    check_instances,
    check_rank_order,
)
