"""Go on writing a text with a trained checkpoint: the library used by itself, without the trainer.

    python examples/train_on_python_source/sample.py --checkpoint runs/train_on_python_source/checkpoints --prompt "def main():"
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core import device, dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpointing import find_checkpoint
from megatron.training.data import build_tokenizer_from_args
from megatron.training.global_vars import set_args, set_global
from pretrain_gpt import model_provider


def load(folder: str) -> tuple[GPTModel, Any, argparse.Namespace]:
    """(model in fp32, tokenizer, the arguments it was trained with)."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        sys.exit(f"--checkpoint {folder}: there is no checkpoint in it (no latest_checkpointed_iteration.txt)")
    args = dist_checkpointing.load_common_state_dict(checkpoint)["args"]
    args.bf16 = args.fp16 = False
    set_args(args)
    tokenizer = build_tokenizer_from_args(args)
    set_global("tokenizer", tokenizer)
    model = model_provider()
    dist_checkpointing.load(model.sharded_state_dict(), checkpoint)
    return model.eval(), tokenizer, args


@torch.no_grad()
def generate(
    model: GPTModel, ids: list[int], *, count: int, window: int, vocab_size: int, eod: int, temperature: float, top_k: int
) -> list[int]:
    """`ids` and up to `count` more, each drawn from the `top_k` likeliest; it ends where the document does."""
    for _ in range(count):
        context = torch.tensor([ids[-window:]], device=device.current_device())
        logits = model(context, torch.arange(context.shape[1], device=context.device)[None], None)[0, -1, :vocab_size].float()
        best = torch.topk(logits / temperature, top_k)
        drawn = int(best.indices[torch.multinomial(best.values.softmax(0), 1)])
        if drawn == eod:
            break
        ids = [*ids, drawn]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="the --save folder of a run")
    parser.add_argument("--prompt", default="import ", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=120, help="the most tokens to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, tokenizer, args = load(options.checkpoint)
    ids = generate(
        model,
        tokenizer.tokenize(options.prompt),
        count=options.tokens,
        window=args.max_position_embeddings,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        temperature=options.temperature,
        top_k=options.top_k,
    )
    print(tokenizer.detokenize(ids))


if __name__ == "__main__":
    main()
