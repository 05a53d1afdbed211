"""What one optimizer step has to do, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass

from loadmaster.describe.require import flag, one_of, real, whole
from loadmaster.errors import InvalidInput

__all__ = ["LOSSES", "OPTIMIZERS", "Workload"]

LOSSES = ("cross_entropy", "fused", "fused_native", "chunked")
# moments kept per parameter
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1, "adagrad": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step's work.

    Attributes:
        global_batch_size: sequences a step, over all ranks.
        seq_len: tokens a sequence.
        optimizer: one of `OPTIMIZERS`.
        loss: ``cross_entropy`` (eager), ``fused`` (no fp32 logits kept), ``chunked``; ``fused_native``: the framework's
            own fusion where it has one (Megatron, accelerate with kernels), else as eager.
        frozen: ``none``; ``lora``: only adapters of `lora_rank` train, on the blocks' linear layers that `lora_targets`
            names (``linear``: all, ``attention``: its projections); ``qlora``: and the frozen matrices are 4-bit.
        causal: count attention FLOPs as causal (half), not full.
        expert_imbalance: tokens that reach the busiest rank's experts over the mean (1: balanced, or capped).
    """

    global_batch_size: int
    seq_len: int
    optimizer: str = "adamw"
    loss: str = "cross_entropy"
    frozen: str = "none"
    lora_rank: int = 0
    lora_targets: str = "linear"
    causal: bool = False
    expert_imbalance: float = 1.0

    def __post_init__(self) -> None:
        whole("workload.global_batch_size", self.global_batch_size)
        whole("workload.seq_len", self.seq_len)
        whole("workload.lora_rank", self.lora_rank, least=0)
        flag("workload.causal", self.causal)
        real("workload.expert_imbalance", self.expert_imbalance, least=1.0)
        one_of("workload.frozen", self.frozen, ("none", "lora", "qlora"))
        one_of("workload.lora_targets", self.lora_targets, ("linear", "attention"))
        one_of("workload.loss", self.loss, LOSSES)
        one_of("workload.optimizer", self.optimizer, OPTIMIZERS)
        if (self.frozen != "none") != (self.lora_rank > 0):
            raise InvalidInput("workload.lora_rank", self.lora_rank, "goes with frozen=lora or qlora", "set both")

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.global_batch_size * self.seq_len
