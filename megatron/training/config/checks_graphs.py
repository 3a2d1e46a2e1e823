"""What CUDA graphs exclude: the rules of core/transformer/cuda_graph_rules.py in the words of the line, and those of batches."""

from collections.abc import Iterator

from megatron.core.transformer.cuda_graph_rules import cuda_graph_problems
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import Args, broken_rule, problem, unbuilt_values
from megatron.training.config.checks_layout import packs_documents


def check_graphs(args: Args) -> Iterator[Problem]:
    if args.enable_cuda_graph and args.cuda_graph_impl != "local":
        yield problem(args, "cuda_graph_impl", "--enable-cuda-graph asks for local", "local")
    if args.cuda_graph_impl == "none" or unbuilt_values(args, "cuda_graph_impl"):
        return
    for broken in cuda_graph_problems(args, args.num_experts):
        yield broken_rule(args, broken)
    if args.sft or packs_documents(args):
        flag = "--sft" if args.sft else "--reset-attention-mask"
        yield problem(args, "cuda_graph_impl", f"excludes {flag}: where documents end is read on the host", "none")


RULES = (check_graphs,)
