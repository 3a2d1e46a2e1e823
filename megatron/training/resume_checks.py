"""What a run and the checkpoint that it goes on from must have in common, and what differs without harm. No torch.

`saved` is always what the checkpoint's `args` hold: dest -> value, of this program, or of Megatron-LM, which has other dests too.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers import vocab_size_with_padding
from megatron.training import config
from megatron.training.argument_utils import all_fields
from megatron.training.config.checks import as_given, name_of, was_given
from megatron.training.config.fields import ARCHITECTURE

Saved = Mapping[str, Any]

# A model's flags that may differ from the checkpoint's: long-context training stretches its positions.
_ADJUSTABLE = {
    "layernorm_epsilon",
    "rope_scaling_factor",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
}
# Flags whose change the report does not mention: they change no number, or the report says it elsewhere.
_UNTOLD = ("num_workers", "data_cache_path", "exit_", "manual_gc", "skip_train", "check_", "yaml_cfg", "override_opt", "use_checkpoint_opt")
_TOLD_SECTIONS = (
    config.ModelFlags,
    config.AttentionFlags,
    config.PositionFlags,
    config.NormFlags,
    config.RecomputeFlags,
    config.MoEFlags,
    config.ParallelismFlags,
    config.BatchFlags,
    config.TrainingFlags,
    config.OptimizerFlags,
    config.LearningRateFlags,
    config.PrecisionFlags,
    config.DataFlags,
    config.TokenizerFlags,
)


@dataclass(frozen=True)
class Taken:
    """What a run takes from a checkpoint beside the weights.

    position: iteration and samples. why_not: the flag, or the kind of checkpoint, for which a run takes less than it could, "" where single
    flags decide.
    """

    optimizer: bool
    random_states: bool
    schedule: bool
    position: bool
    why_not: str = ""

    @classmethod
    def by_flags(cls, args: argparse.Namespace, weights_alone: str, has_optimizer: bool = True) -> "Taken":
        """weights_alone: why nothing but the weights is taken, "" where the run goes on."""
        if weights_alone:
            return cls(False, False, False, False, weights_alone)
        if args.skip_train:  # nothing is stepped: a line to evaluate with need not describe the training
            return cls(False, False, False, True, "--skip-train")
        return cls(has_optimizer and not args.no_load_optim, not args.no_load_rng, True, True)

    def restored(self) -> str:
        return self._names(True)

    def reset(self) -> str:
        """What begins anew, with the flags that say so; "" for nothing."""
        if self.why_not:
            return f"{self._names(False)} ({self.why_not})"
        flags = [(self.optimizer, "optimizer (--no-load-optim)"), (self.random_states, "random states (--no-load-rng)")]
        return ", ".join(text for is_taken, text in flags if not is_taken)

    def _names(self, taken: bool) -> str:
        parts = {"optimizer": self.optimizer, "random states": self.random_states, "schedule": self.schedule, "position": self.position}
        return ", ".join([*(["weights"] if taken else []), *(name for name, is_taken in parts.items() if is_taken == taken)])


def refusals(taken: Taken, saved: Saved, args: argparse.Namespace) -> list[str]:
    """Why this run cannot take that from the checkpoint, all reasons, in words; as far as its arguments tell."""
    found = model_differences(saved, args)
    if taken.position:
        found += vocabulary_differences(saved, args)
    before, now = saved.get("optimizer"), args.optimizer
    if taken.optimizer and before is not None and before != now:
        found.append(f"--optimizer is {now} here and {before} there: give --optimizer {before}, or --no-load-optim for a fresh one")
    return found


# --- the model ---


def architecture_flags(saved: Saved) -> list[str]:
    """Dests that decide which weights there are and what is computed with them."""
    dests = [dest for dest, field in all_fields().items() if field.metadata["checkpoint"] == ARCHITECTURE]
    if saved.get("position_embedding_type") == "learned_absolute":
        dests.append("max_position_embeddings")  # the rows of a table of weights
    return dests


def model_differences(saved: Saved, args: argparse.Namespace) -> list[str]:
    """Flags of the model's shape that are not as in the checkpoint's arguments, in words."""
    here = vars(args)
    found = []
    for dest in architecture_flags(saved):
        if dest not in saved or dest not in here or dest in _ADJUSTABLE or _is_idle(dest, saved, here):
            continue
        before, now = _effective(saved, dest), _effective(here, dest)
        if before != now:
            found.append(f"{name_of(dest)} is {as_given(dest, now)} here and {as_given(dest, before)} there")
    return found


def _is_idle(dest: str, saved: Saved, here: Saved) -> bool:
    """Whether a flag says nothing about either model."""
    if dest == "add_qkv_bias":  # the linears have biases, this one among them
        return bool(here["add_bias_linear"] and saved.get("add_bias_linear"))
    if dest == "num_query_groups":
        return not (here["group_query_attention"] and saved.get("group_query_attention"))
    if dest.startswith("moe_"):
        return here["num_experts"] is None or saved.get("num_experts") is None
    return False


def _effective(values: Saved, dest: str) -> Any:
    """A flag's value in the one form that all spellings of it have."""
    value = values[dest]
    if dest == "moe_ffn_hidden_size" and value is None:
        return values.get("ffn_hidden_size")
    return list(value) if isinstance(value, tuple) else value


# --- the vocabulary ---


def vocabulary_differences(saved: Saved, args: argparse.Namespace) -> list[str]:
    """Why ids of this run's tokenizer would meet the weights of others, in words.

    A checkpoint of ours says which tokenizer it was trained with; another program's rows say how many ids there were, up to padding.
    """
    now, before = getattr(args, "tokenizer_record", None), saved.get("tokenizer_record")
    if now is None:
        return []
    if before is not None:
        alike = now["fingerprint"] == before["fingerprint"]
        if "NullTokenizer" in (now["type"], before["type"]):  # it stands for any tokenizer, for training on ids alone
            alike = now["vocab_size"] == before["vocab_size"]
        if alike:
            return []
        return [f"the tokenizer is {_tokenizer(now)} here and {_tokenizer(before)} there: ids would stand for other texts; give that one"]
    rows = saved.get("padded_vocab_size")
    is_fixed = args.provenance.get("padded_vocab_size") != "derived"  # to a number of rows, which then are all the model's
    if not rows or (is_fixed and args.padded_vocab_size == rows):
        return []
    unit, ranks = saved.get("make_vocab_size_divisible_by") or 1, saved.get("tensor_model_parallel_size") or 1
    if now["vocab_size"] <= rows <= vocab_size_with_padding(now["vocab_size"], unit, ranks):
        return []
    return [f"the tokenizer has {now['vocab_size']} ids here, and there the vocabulary has {rows} rows, with padding to {unit} x {ranks}"]


def _tokenizer(record: Saved) -> str:
    return f"{record['type']} of {record['vocab_size']} ids ({record['fingerprint'][:12]})"


# --- what may differ, and is told ---


def changed_flags(saved: Saved, args: argparse.Namespace) -> Iterator[str]:
    """Flags of the model, the layout, the batch, the optimizer and the data that are not what they were; this run's hold."""
    for section in _TOLD_SECTIONS:
        for field in dataclasses.fields(section):
            dest = field.name
            if dest not in saved or dest.startswith(_UNTOLD) or field.metadata["no_effect"]:
                continue
            before, now = _effective(saved, dest), _effective(vars(args), dest)
            if before != now and (before or now) and (before is None or isinstance(before, str | int | float | list)):
                given = "" if was_given(args, dest) or args.provenance.get(dest) else " (not given)"
                yield f"{name_of(dest)} {as_given(dest, before)} -> {as_given(dest, now)}{given}"


def changes_of_data(saved: Saved, args: argparse.Namespace) -> list[str]:
    """What makes this run read other samples than the one it goes on from, in one sentence each."""
    effects = {
        "seq_length": "documents are cut and shuffled anew: tokens that were read may come again, others are left out",
        "split": "documents move between training, validation and test: held-out text may be trained on",
        "seed": "samples come in another order: some that were read come again, others are left out",
        "dataloader_type": "samples come in another order: some that were read come again, others are left out",
        "global_batch_size": "the order of samples goes on, but steps consume another number of them",
    }
    found = []
    for dest, effect in effects.items():
        before, now = saved.get(dest), getattr(args, dest, None)
        if before is not None and before != now:
            found.append(f"{name_of(dest)} is {now} and was {before} in the checkpoint: {effect}")
    return found
