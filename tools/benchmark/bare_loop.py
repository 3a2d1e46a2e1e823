"""Our training step against a bare PyTorch loop of the same GPT, both in one run, in turns: `python tools/benchmark/bare_loop.py`.

Six layers, hidden 384, 6 heads, sequence 256, micro batch 8, vocabulary 8192, fp32, learned positions, LayerNorm, GELU, biases, a tied
head, AdamW, clipping. The bare loop is what one would write by hand with torch.nn and the fused optimizer. Prints tokens per second of
both and their ratio (median over rounds), and the first losses of both from the same weights, which must agree.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from command_line import check_can_be_written, count
from torch import nn

from megatron.core.utils import unwrap_model
from megatron.training.arguments import finalize_args, parse_args, validate_args
from megatron.training.data import build_tokenizer_from_args
from megatron.training.global_vars import set_global
from megatron.training.initialize import initialize_megatron
from megatron.training.model_setup import setup_model_and_optimizer
from megatron.training.train_step import TrainingRun, TrainState, train_step

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 6, 384, 6, 256, 8, 8192
LEARNING_RATE, WEIGHT_DECAY, CLIP, BETAS = 1e-4, 0.1, 1.0, (0.9, 0.95)


class BareBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, HEADS, 3, h // HEADS).permute(3, 0, 2, 1, 4)  # by head: q, k, v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class BareGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList([BareBlock() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))


# bare name -> ours
NAMES = {"norm1": "input_layernorm", "norm2": "pre_mlp_layernorm", "qkv": "self_attention.linear_qkv", "proj": "self_attention.linear_proj"}
NAMES |= {"fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2"}


def ours_for(name: str) -> str:
    part = name.split(".")
    if part[0] == "blocks":
        return f"decoder.layers.{part[1]}.{NAMES[part[2]]}.{part[3]}"
    heads = {"tokens": "embedding.word_embeddings", "positions": "embedding.position_embeddings", "norm": "decoder.final_layernorm"}
    return f"{heads[part[0]]}.{part[1]}"


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens, the same for both loops."""
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(BATCH, SEQUENCE), "position_ids": positions}


def make_ours() -> tuple[Callable[[], float], nn.Module]:
    """A function that makes one of our steps and returns its loss, and the model."""
    from pretrain_gpt import forward_step, model_provider

    flags = (
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE} "
        f"--max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH} --global-batch-size {BATCH} --train-iters 1000 "
        f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} "
        f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --attention-dropout 0 --hidden-dropout 0 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --no-create-attention-mask-in-dataloader --transformer-impl local"
    )
    args = finalize_args(validate_args(parse_args(argv=flags.split())))
    initialize_megatron(parsed_args=args)
    set_global("tokenizer", build_tokenizer_from_args(args))
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType.encoder_or_decoder, args)
    run = TrainingRun(
        model, optimizer, scheduler, forward_step, get_forward_backward_func(), TrainState(), SEQUENCE, BATCH, args.train_iters, 0.0
    )
    stream = batches()

    def step() -> float:
        total, count = train_step(run, stream).losses["lm loss"].tolist()
        return total / count

    return step, unwrap_model(model[0])


def make_bare(ours: nn.Module) -> Callable[[], float]:
    """A function that makes one bare step, from the same weights."""
    model = BareGPT()
    mine = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mine[ours_for(name)])
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    stream = batches()

    def step() -> float:
        batch = next(stream)
        optimizer.zero_grad()
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def measure(step: Callable[[], float], steps: int) -> float:
    """Tokens per second over `steps` steps."""
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * BATCH * SEQUENCE / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=7, help="turns of each loop")
    parser.add_argument("--steps", type=count, default=3, help="steps of one turn")
    parser.add_argument("--json", help="write the numbers to this file too")
    options = parser.parse_args()
    check_can_be_written(parser, options.json)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    ours, model = make_ours()
    bare = make_bare(model)
    losses = [(ours(), bare()) for _ in range(3)]
    print("first losses, ours and bare: " + ", ".join(f"{a:.6f} {b:.6f}" for a, b in losses))
    turns = [(measure(ours, options.steps), measure(bare, options.steps)) for _ in range(options.rounds)]
    for a, b in turns:
        print(f"  ours {a:7.0f} tokens/s   bare {b:7.0f} tokens/s   ratio {a / b:.3f}")
    fast, plain = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    print(f"median: ours {fast:.0f}, bare {plain:.0f} tokens/s, ratio {ratio:.3f} (torch {torch.__version__}, {options.threads} threads)")
    if options.json:
        Path(options.json).write_text(json.dumps({"ours": fast, "bare": plain, "ratio": ratio, "threads": options.threads}))


if __name__ == "__main__":
    main()
