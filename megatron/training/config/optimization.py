"""Optimizer, learning rate, precision."""

from dataclasses import dataclass

from megatron.core.optimizer_param_scheduler import LR_DECAY_STYLES, WD_INCR_STYLES, WSD_DECAY_STYLES
from megatron.training.config.fields import flag


@dataclass
class OptimizerFlags:
    """The optimizer and its regularization."""

    optimizer: str = flag(
        "adam",
        "Adam (with decoupled weight decay) or SGD with momentum.",
        choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
        built=("adam", "sgd"),
    )
    adam_beta1: float = flag(0.9, "Decay of the mean of gradients.", minimum=0.0, below=1.0)
    adam_beta2: float = flag(0.999, "Decay of the mean of squared gradients.", minimum=0.0, below=1.0)
    adam_eps: float = flag(1e-08, "Added to the root of the second moment.", minimum=0.0)
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", minimum=0.0, below=1.0)
    clip_grad: float = flag(1.0, "Largest global L2 norm of the gradients; 0 = no clipping.", minimum=0.0)
    weight_decay: float = flag(0.01, "Weight decay of matrices; norms and biases have none.", minimum=0.0)
    start_weight_decay: float | None = flag(None, "Its first value, with --weight-decay-incr-style linear or cosine.", minimum=0.0)
    end_weight_decay: float | None = flag(None, "Its last value, with --weight-decay-incr-style linear or cosine.", minimum=0.0)
    weight_decay_incr_style: str = flag("constant", "How it grows over training.", choices=WD_INCR_STYLES)
    apply_wd_to_qk_layernorm: bool = flag(False, "Weight decay also for the norms of query and key heads.")


@dataclass
class LearningRateFlags:
    """The rate over training. The schedule counts samples; an iteration counts as --global-batch-size of them."""

    lr: float | None = flag(None, "Largest rate, reached after warm-up.", minimum=0.0)
    min_lr: float = flag(0.0, "Rate at the end of the decay.", minimum=0.0)
    lr_decay_style: str = flag("linear", "Shape of the decay.", choices=LR_DECAY_STYLES)
    lr_decay_iters: int | None = flag(
        None, "End of the decay, counted from the start, warm-up included. Default: --train-iters.", unit="iterations", minimum=1
    )
    lr_decay_samples: int | None = flag(None, "The same in samples. Default: --train-samples.", unit="samples", minimum=1)
    lr_warmup_iters: int = flag(0, "Length of the linear warm-up.", unit="iterations", minimum=0)
    lr_warmup_samples: int = flag(0, "The same in samples.", unit="samples", minimum=0)
    lr_warmup_fraction: float | None = flag(None, "The same as a share of the decay's length.", minimum=0.0, maximum=1.0)
    lr_warmup_init: float = flag(0.0, "Rate at the start of warm-up.", minimum=0.0)
    lr_wsd_decay_style: str = flag("exponential", "Shape of WSD's decay.", choices=WSD_DECAY_STYLES)
    lr_wsd_decay_iters: int | None = flag(None, "Length of WSD's decay, at the end.", unit="iterations", minimum=1)
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples.", unit="samples", minimum=1)
    decoupled_lr: float | None = flag(None, "Another rate for embedding and head.", minimum=0.0)
    decoupled_min_lr: float | None = flag(None, "Its end of decay; with --decoupled-lr.", minimum=0.0)
    override_opt_param_scheduler: bool = flag(
        False,
        "On resume these flags win over the checkpoint's schedule.",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resume the checkpoint's schedule wins over these flags.",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass
class PrecisionFlags:
    """Number formats. Without --bf16 and --fp16 everything is fp32."""

    bf16: bool = flag(False, "Compute in bfloat16 with fp32 main weights.")
    fp16: bool = flag(False, "Compute in float16 with fp32 main weights and loss scaling.")
    loss_scale: float | None = flag(None, "A constant loss scale for --fp16. Default: dynamic.", above=0.0)
    initial_loss_scale: float = flag(4294967296, "First value of the dynamic loss scale.", above=0.0)
    min_loss_scale: float = flag(1.0, "Smallest value of the dynamic loss scale.", above=0.0)
    loss_scale_window: float = flag(1000, "Good steps in a row before the dynamic loss scale doubles.", unit="iterations", minimum=1)
    hysteresis: int = flag(2, "Bad steps before the dynamic loss scale halves.", unit="iterations", minimum=1)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Gradients are summed in fp32; always so with --bf16, unless --grad-reduce-in-bf16 is given."
    )
    grad_reduce_in_bf16: bool = flag(False, "With --bf16: gradients are kept and summed in bf16.")
