"""FP8: which products of the decoder layers are in 8 bits, and how their scales are found."""

from dataclasses import dataclass

from megatron.core.fp8.settings import AMAX_ALGOS, FORMATS, RECIPES
from megatron.training.config.fields import flag


@dataclass
class Fp8Flags:
    """Matrix products of the decoder layers in FP8, with --bf16 (docs/fp8.md)."""

    fp8: str | None = flag(
        None, "`e4m3`: all in this format; `hybrid`: gradients in e5m2. Default: no FP8.", names=("--fp8-format",), choices=FORMATS
    )
    fp8_hybrid: bool = flag(False, "The former spelling of --fp8-format hybrid.", ours=True)
    fp8_e4m3: bool = flag(False, "The former spelling of --fp8-format e4m3.", ours=True)
    fp8_recipe: str = flag(
        "delayed",
        "`delayed`: a scale a tensor, from the steps before; `tensorwise`: from the tensor itself; `blockwise`: a scale for 1 x 128 "
        "activations and gradients, 128 x 128 weights; `mxfp8`: for 1 x 32, on GPUs of compute capability 10.0 and above.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        built=RECIPES,
    )
    fp8_margin: int = flag(0, "Delayed scaling: powers of two by which scales stay below what the history allows.")
    fp8_interval: int = flag(1, "Steps between updates of the scales.", unit="steps", no_effect="they are updated every step")
    fp8_amax_history_len: int = flag(1, "Delayed scaling: length of the history of largest magnitudes.", unit="steps", minimum=1)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "Delayed scaling: which of the history counts, the newest or the largest.", choices=AMAX_ALGOS
    )
    fp8_wgrad: bool = flag(True, "Weight gradients are products in bf16.")
    first_last_layers_bf16: bool = flag(False, "The first and last layers, as the two flags below say, stay in bf16.")
    num_layers_at_start_in_bf16: int = flag(1, "With --first-last-layers-bf16: layers at the start.", minimum=0)
    num_layers_at_end_in_bf16: int = flag(1, "With --first-last-layers-bf16: layers at the end.", minimum=0)
    fp8_param_gather: bool = flag(
        False, "Gather parameters in FP8.", no_effect="they are gathered in bf16 and quantized after, which gives the same products"
    )
