"""The loss of a micro-batch as (sum, count): the mean is taken once, over the whole window and every data rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loadmaster.errors import InvalidInput

__all__ = ["IGNORED", "CausalLanguageModel", "CountFunction", "LossFunction", "count_labels"]

IGNORED = -100  # label of a position that does not count

MicroBatch = dict[str, Any]
# (module, micro-batch) -> (sum of the losses, how many it sums over)
LossFunction = Callable[[nn.Module, MicroBatch], tuple[Tensor, Tensor | int | float]]
# micro-batch -> how many losses it will sum over, known before its forward
CountFunction = Callable[[MicroBatch], Tensor | int | float]


def count_labels(batch: MicroBatch) -> Tensor:
    """Positions that count: labels after the shift by one that are not `IGNORED`."""
    if "labels" not in batch:
        raise InvalidInput(
            "micro-batch.labels", "missing", "is needed to count tokens", "give labels, or a loss of your own"
        )
    labels: Tensor = batch["labels"]
    return (labels[..., 1:] != IGNORED).sum()


class CausalLanguageModel:
    """Next-token cross entropy summed over counted positions, in fp32.

    Labels follow Hugging Face: equal to the inputs, shifted here, `IGNORED` where nothing counts.

    Args:
        kind: ``cross_entropy``: of the module's logits. ``chunked``: head and loss `chunk` tokens at a time, each
            recomputed in backward, so that logits of a micro-batch never exist whole. ``fused``: PyTorch's
            linear cross entropy, which does the same in one op. The last two need a Hugging Face model whose logits
            are its head's output as it is.
        chunk: tokens at a time.
    """

    def __init__(self, kind: str = "cross_entropy", chunk: int = 1024) -> None:
        if kind not in _KINDS:
            raise InvalidInput("workload.loss", kind, "is not known", f"use one of {', '.join(_KINDS)}")
        self.kind, self.chunk = kind, chunk

    def __call__(self, module: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum, count) of one micro-batch."""
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "loss_weight")}
        targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        count = (targets != IGNORED).sum()
        if self.kind == "cross_entropy":
            out = module(**inputs)
            logits = out if isinstance(out, Tensor) else out["logits"] if isinstance(out, dict) else out.logits
            return cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), targets), count
        body, head = _body_and_head(module, self.kind)
        hidden = body(**inputs)[0]
        return _KINDS[self.kind](hidden.reshape(-1, hidden.shape[-1]), head, targets, self.chunk), count


def cross_entropy_sum(rows: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax over targets that count."""
    return F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="sum")


def _chunked(hidden: Tensor, head: nn.Linear, targets: Tensor, chunk: int) -> Tensor:
    def part(h: Tensor, t: Tensor) -> Tensor:
        return cross_entropy_sum(head(h), t)

    pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    return torch.stack([checkpoint(part, h, t, use_reentrant=False) for h, t in pieces]).sum()


def _fused(hidden: Tensor, head: nn.Linear, targets: Tensor, chunk: int) -> Tensor:
    if head.bias is not None:
        raise InvalidInput("workload.loss", "fused", "is not for a head with a bias", "use chunked")
    fused: Any = getattr(F, "linear_cross_entropy", None)
    if fused is None:
        return _chunked(hidden, head, targets, chunk)
    options: Any = getattr(nn, "LinearCrossEntropyOptions", None)
    extra = {"options": options()} if options is not None else {}
    total: Tensor = fused(hidden, head.weight, targets, ignore_index=IGNORED, reduction="sum", **extra)
    return total


_KINDS: dict[str, Callable[[Tensor, nn.Linear, Tensor, int], Tensor]] = {
    "cross_entropy": lambda hidden, head, targets, chunk: cross_entropy_sum(head(hidden), targets),
    "chunked": _chunked,
    "fused": _fused,
}
_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # config fields of work done on logits


def _body_and_head(module: Any, kind: str) -> tuple[nn.Module, nn.Linear]:
    """The model below its head, and the head."""
    config, head = getattr(module, "config", None), None
    if hasattr(module, "get_output_embeddings"):
        head = module.get_output_embeddings()
    changed = [f for f in _AFTER_HEAD if getattr(config, f, None) not in (None, 1, 1.0)]
    body = getattr(module, getattr(module, "base_model_prefix", "") or " ", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module) or changed:
        why = f"with {changed[0]}" if changed else "that is no causal model of transformers"
        raise InvalidInput("workload.loss", kind, f"does not apply to a module {why}", "use cross_entropy")
    return body, head
