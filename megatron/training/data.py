"""From flags to the tokenizer, the three datasets and their loaders."""

import argparse
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core import device, parallel_state
from megatron.core.datasets import index_cache
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator
from megatron.core.tokenizers import build_tokenizer, check_fingerprint, tokenizer_record, vocab_size_with_padding
from megatron.training import global_vars
from megatron.training.argument_utils import Problem, UsageError
from megatron.training.arguments import microbatches_calculator_args, was_given
from megatron.training.config import TokenizerFlags
from megatron.training.data_order import DataOrder
from megatron.training.data_report import table_of_datasets
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.datasets.whole_batches import WholeBatches
from megatron.training.phase import phase
from megatron.training.training_log import print_rank_0


def build_tokenizer_from_args(args: argparse.Namespace) -> Any:
    """The tokenizer; sets args.padded_vocab_size, args.softmax_vocab_size and args.tokenizer_record, which checkpoints keep.

    Rows that are there only to divide the vocabulary over tensor-parallel ranks never enter the softmax: the loss does not depend on the
    layout. A size that was fixed by --padded-vocab-size (or by the checkpoint of another program) enters it whole, as in Megatron-LM.
    Raises UsageError when the model's vocabulary is too small for the ids that the tokenizer makes, WrongTokenizerError when another one
    made the data.
    """
    accepted = inspect.signature(build_tokenizer).parameters
    names = [field.name for field in dataclasses.fields(TokenizerFlags) if field.name in accepted]
    tokenizer = build_tokenizer(**{name: getattr(args, name) for name in names})
    blends = [get_blend_from_list(paths) for paths in _data_lists(args)]
    check_fingerprint([prefix for blend in blends if blend for prefix in blend[0]], tokenizer)
    args.tokenizer_record = tokenizer_record(tokenizer)
    padded = vocab_size_with_padding(tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    fixed = args.padded_vocab_size if args.provenance.get("padded_vocab_size") != "derived" else None
    if fixed is not None and fixed < tokenizer.vocab_size:
        rule = f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary must hold them all"
        raise UsageError([Problem("--padded-vocab-size", str(fixed), rule, f"--padded-vocab-size {padded}")])
    if fixed is not None and fixed % args.tensor_model_parallel_size:
        rule = f"must be a multiple of --tensor-model-parallel-size {args.tensor_model_parallel_size}"
        raise UsageError([Problem("--padded-vocab-size", str(fixed), rule, f"--padded-vocab-size {padded}")])
    if was_given(args, "vocab_size") and args.tokenizer_type != "NullTokenizer" and args.vocab_size < tokenizer.vocab_size:
        rule = f"the tokenizer has {tokenizer.vocab_size} ids"
        raise UsageError([Problem("--vocab-size", str(args.vocab_size), rule, f"--vocab-size {tokenizer.vocab_size}")])
    if fixed is None:
        args.provenance["padded_vocab_size"] = "derived"
    args.padded_vocab_size = fixed or padded
    args.softmax_vocab_size = fixed or vocab_size_with_padding(tokenizer.vocab_size, args.make_vocab_size_divisible_by)
    print_rank_0(f" > {args.tokenizer_type}: {tokenizer.vocab_size} ids, padded to {args.padded_vocab_size}")
    return tokenizer


def _data_lists(args: argparse.Namespace) -> list[list[str] | None]:
    """What names pairs of tokens; conversations (--sft) are text."""
    return [] if args.mock_data or args.sft else [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]


def train_iterations(args: argparse.Namespace) -> int:
    """Iterations of the whole run: --train-iters, or as many whole global batches as --train-samples has, of whichever sizes."""
    if args.train_samples is None:
        return args.iteration if args.train_iters is None else args.train_iters  # None: with --skip-train
    sizes = build_num_microbatches_calculator(*microbatches_calculator_args(args))
    iterations = consumed = 0
    while True:
        sizes.update(consumed, consistency_check=False)
        batch = sizes.get_current_global_batch_size()
        if sizes.is_final(consumed):
            return iterations + max(0, args.train_samples - consumed) // batch
        if consumed + batch > args.train_samples:
            return iterations
        iterations, consumed = iterations + 1, consumed + batch


def num_samples(args: argparse.Namespace) -> list[int | None]:
    """Samples that the run asks of the training, validation and test sets; None: each of the set's once (--full-validation).

    As Megatron-LM counts them at a first start: an order of samples may depend on these numbers.
    """
    batch = args.global_batch_size
    train = args.train_samples or args.train_iters * batch
    if args.full_validation:
        return [train, None, None]
    return [train, _evaluations(args, 0) * args.eval_iters * batch, args.eval_iters * batch]


def num_samples_going_on(args: argparse.Namespace) -> list[int | None]:
    """The same where an earlier start has decided on the order: what was consumed, by whatever batches, and what is still to come."""
    batch = args.global_batch_size
    left = max(0, args.train_iters - args.iteration)
    train = args.train_samples or args.consumed_train_samples + left * batch
    if args.full_validation:
        return [train, None, None]
    return [train, args.consumed_valid_samples + _evaluations(args, args.iteration) * args.eval_iters * batch, args.eval_iters * batch]


def _evaluations(args: argparse.Namespace, done: int) -> int:
    """Evaluations after iteration `done`, with the one at the end."""
    return args.train_iters // args.eval_interval - done // args.eval_interval + 1 if args.eval_interval else 1


class HeldOutSet:
    """Data for evaluations: its name in logs ("" when there is only one of its kind) and batches, each read once.

    With `whole_set` every evaluation reads the set from its start to its end; otherwise each goes on where the last one stopped, for
    `num_iterations` global batches.
    """

    def __init__(self, name: str, make_loader: Callable[[int], Any], consumed: int, num_iterations: int, whole_set: bool) -> None:
        self.name = name
        self.num_iterations = num_iterations
        self._make_loader = make_loader
        self._whole_set = whole_set
        self._continuing = None if whole_set else BatchStream(make_loader(consumed), name or "validation")

    def batches(self) -> Iterator:
        """What the next evaluation reads."""
        return self._continuing or BatchStream(self._make_loader(0), self.name or "validation")


def call_provider(args: argparse.Namespace, provider: Callable, data_order: DataOrder) -> tuple[Any, Any, Any]:
    """The script's training, validation and test datasets, which go on in the order of an earlier start where there was one."""
    started, used = time.monotonic(), dataclasses.replace(index_cache.use)
    plans, reason = data_order.plans_for(args)
    if reason is not None:
        print_rank_0(f"WARNING: {reason}")
    # also an order that begins anew does so at this position, which other batches may have led to
    samples = num_samples_going_on(args) if reason is not None or (plans is not None and plans["train"]) else num_samples(args)
    if plans is None:
        data_order.state = DataOrder.of_this_run(args).state
    elif plans["train"] and args.dataloader_type == "cyclic":
        samples = [plans["train"][0]["size"], *samples[1:]]  # another number would be shuffled into another order
    args.data_order = plans
    try:
        train, valid, test = provider(samples)
    finally:
        args.data_order = None
    data_order.attach(train, valid)
    built, found = index_cache.use.built - used.built, index_cache.use.found - used.found
    caches = f"{built} index(es) built, {found} found in the cache"
    print_rank_0(f" > built the datasets in {time.monotonic() - started:.1f} s ({samples[0]} training samples asked; {caches})")
    print_rank_0(table_of_datasets(train, valid, test))
    return train, valid, test


def build_indices(args: argparse.Namespace, provider: Callable) -> None:
    """--build-index-only: fill the index caches as a training with these flags would, in one process, without groups or a model.

    With --load the indices are those that the training goes on with. Raises ValueError when what was built cannot be kept.
    """
    from megatron.training.checkpointing import stored_position  # here, as in training.py

    if args.rank != 0:
        return
    global_vars.set_args(args)
    global_vars.set_global("tokenizer", build_tokenizer_from_args(args))
    state = stored_position(args)
    args.iteration, args.consumed_train_samples = state.iteration, state.consumed_train_samples
    args.consumed_valid_samples = state.consumed_valid_samples
    args.train_iters = train_iterations(args)
    unsaved = index_cache.use.unsaved
    call_provider(args, provider, state.data_order or DataOrder.of_this_run(args))
    if (lost := index_cache.use.unsaved - unsaved) and not args.mock_data:
        raise ValueError(
            f"--build-index-only: {lost} index(es) were built and not stored; give --data-cache-path a folder that can be written to "
            "(the order of a blend is kept nowhere else)"
        )


def build_datasets(args: argparse.Namespace, provider: Callable, data_order: DataOrder) -> tuple[Any, list[HeldOutSet], list[HeldOutSet]]:
    """(training batches, validation sets, test sets), each beginning where the run stands."""
    train, valid, test = call_provider(args, provider, data_order)
    if train is None and not args.skip_train:
        raise ValueError(f"there is no training data: --split {args.split} gives training no documents; give it some, such as 969,30,1")

    def loader(dataset: Any, consumed: int) -> Any:
        return build_pretraining_data_loader(
            dataset,
            consumed,
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            dataloader_type=args.dataloader_type,
            num_workers=args.num_workers,
            seed=args.seed,
            pin_memory=device.has_accelerator(),
        )

    return (
        BatchStream(loader(train, args.consumed_train_samples), "training"),
        _held_out(args, "validation", valid, loader, args.consumed_valid_samples),
        _held_out(args, "test", test, loader, 0),
    )


def _held_out(args: argparse.Namespace, kind: str, datasets: Any, loader: Callable, consumed: int) -> list[HeldOutSet]:
    """One unnamed set, or with --multiple-validation-sets one for each corpus under a name."""
    if isinstance(datasets, list | tuple):
        names = args.validation_set_names or [_name_of(dataset, place) for place, dataset in enumerate(datasets)]
        if len(names) != len(datasets):
            rule = f"there are {len(datasets)} validation sets, each needs one name"
            raise UsageError([Problem("--validation-set-names", " ".join(names), rule)])
        named = dict(zip(names, datasets, strict=True))
    else:
        named = {"": datasets}
    found = []
    if datasets is None and args.eval_iters and not args.full_validation:
        print_rank_0(f"WARNING: there is no {kind} data: nothing is evaluated on it (see --split; --eval-iters 0 is silent)")
    for name, dataset in named.items():
        iterations = args.eval_iters
        if args.full_validation and dataset is not None:
            dataset = WholeBatches(dataset, args.global_batch_size)
            iterations = len(dataset) // args.global_batch_size
        if dataset is not None and iterations:
            found.append(HeldOutSet(name, partial(loader, dataset), consumed, iterations, args.full_validation))
    return found


def _name_of(dataset: Any, place: int) -> str:
    path = getattr(dataset, "dataset_path", None)
    return str(path).rpartition("/")[2] if path else f"set {place}"


class BatchStream:
    """The micro batches of a loader, which is opened at the first; says what ran out when it does."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self.iterator: Iterator | None = None

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Any:
        if self.loader is None:
            raise ValueError(f"there is no {self.name} data: --data-path or --split gives that split no documents")
        if self.iterator is None:
            self.iterator = iter(self.loader)
        try:
            with phase("data loading", timed=False):
                return next(self.iterator)
        except StopIteration:
            raise ValueError(
                f"the {self.name} data ran out: it has fewer samples than the run asks for; "
                "--dataloader-type cyclic goes on with another epoch"
            ) from None
