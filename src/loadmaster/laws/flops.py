"""FLOPs of a step: forward, backward, recompute; what the model asks for and what the hardware does.

Matrix products only, a multiply-add is 2. A linear layer costs 2 K N a token forward and twice that backward (input's
and weights' gradient), so a step is three forwards: Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) with the
look-up left out and the head always in. Attention scores and weighted sum cost 2 heads (d_qk + d_v) keys a token,
counted over the full square unless `Workload.causal`. Where three forwards is wrong, `backward_over_forward` says by
how much: flash attention makes scores again (5 products for 2), frozen weights take no gradient, recompute adds a
forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Device
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Op, OpKind
from loadmaster.describe.workload import Workload

__all__ = [
    "OpFlops", "backward_over_forward", "block_flops", "flops", "op_flops", "op_rows", "palm_flops_per_token",
    "utilisation",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFlops:
    """Forward FLOPs of an op for one sample: linear ones and those of the attention core."""

    linear: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.linear + self.attention

    def __add__(self, other: OpFlops) -> OpFlops:
        return OpFlops(linear=self.linear + other.linear, attention=self.attention + other.attention)


def op_rows(block: Block, op: Op, seq_len: int) -> float:
    """Rows of the product a sample: tokens of a decoder, patches of a ViT, frames of Whisper.

    From the value's width: rows * d_in elements enter and rows * d_out leave, so rows^2 = in * out / (d_in d_out).
    """
    x, y = block.value(op.inputs[0]), block.value(op.outputs[0])
    matrix = next(w for w in op.weights if w.multiplies)
    if matrix.num_experts > 1:
        return float(seq_len**x.seq_power)
    inner = matrix.matmul_params or 1
    return float(max(1, round((x.width * y.width / inner) ** 0.5)) * seq_len**x.seq_power)


def op_flops(block: Block, op: Op, seq_len: int, *, causal: bool = False) -> OpFlops:
    """Forward FLOPs of `op` for one sample of `seq_len` tokens.

    >>> from loadmaster.describe.model import Model
    >>> block = Model.from_hf("meta-llama/Meta-Llama-3-8B").blocks[0][0]
    >>> core = next(op for op in block.ops if op.attention)
    >>> op_flops(block, core, 8192).attention / 8192
    134217728.0
    """
    if op.flops is not None:
        return OpFlops(linear=op.flops)
    if op.attention is not None:
        core, q = op.attention, block.value(op.inputs[0])
        queries = q.width / (core.num_heads * core.head_dim) * seq_len**q.seq_power
        keys = core.mean_keys(seq_len if q.seq_power else round(queries), count_causal=causal)
        return OpFlops(attention=2.0 * core.num_heads * (core.head_dim + core.v_head_dim) * keys * queries)
    matmul_params = sum(w.matmul_params for w in op.weights)
    if not matmul_params or op.kind is OpKind.EMBEDDING:
        return OpFlops()
    return OpFlops(linear=2.0 * matmul_params * op_rows(block, op, seq_len))


def block_flops(block: Block, seq_len: int, *, causal: bool = False) -> OpFlops:
    """Forward FLOPs of a block for one sample."""
    return sum((op_flops(block, op, seq_len, causal=causal) for op in block.ops), OpFlops())


def flops(model: Model, workload: Workload, layout: Any) -> dict[str, Any]:
    """FLOPs of a step over all devices: ``forward``, ``backward``, ``recompute``, ``model``, ``hardware``.

    model = forward + backward (what MFU counts); hardware = model + recompute (what HFU counts). Frozen weights
    (LoRA) take no gradient of their own; their input's gradient remains.

    >>> from loadmaster.describe.layout import Layout
    >>> work = Workload(global_batch_size=1, seq_len=4096)
    >>> step = flops(Model.from_hf("meta-llama/Llama-2-7b-hf"), work, Layout(recompute="full"))
    >>> step["model"] == 3 * step["forward"], round(step["hardware"] / step["model"], 3)
    (True, 1.328)
    """
    samples, causal = workload.global_batch_size, workload.causal
    parts = [(block_flops(b, model.seq_len_of(b, workload.seq_len), causal=causal), n) for b, n in model.blocks]
    blocks = sum((OpFlops(linear=f.linear * n, attention=f.attention * n) for f, n in parts), OpFlops())
    first, last = (block_flops(b, model.seq_len_of(b, workload.seq_len)) for b in (model.embedding, model.head))
    ends = first + last
    forward = samples * (blocks + ends).total
    weights = 1.0 if workload.frozen == "none" else 0.0
    backward = samples * ((1.0 + weights) * (blocks + ends).linear + 2.0 * blocks.attention)
    again = samples * _recomputed(model, blocks, layout)
    total = forward + backward
    return {"forward": forward, "backward": backward, "recompute": again, "model": total, "hardware": total + again}


def _recomputed(model: Model, blocks: OpFlops, layout: Any) -> Any:
    """Forward FLOPs a sample runs a second time."""
    match layout.recompute:
        case "full":
            return blocks.total
        case "selective":
            return blocks.attention
        case "blocks":
            share = np.minimum(1.0, np.asarray(layout.recompute_blocks) * layout.pp / model.num_layers)[()]
            return blocks.total * share
        case _:
            return 0.0


def backward_over_forward(model: Model, workload: Workload, layout: Any) -> dict[str, float]:
    """Where "a step costs three forwards" holds and where it does not, as backward FLOPs over forward FLOPs.

    ``linear`` 2; ``attention (flash)`` 2.5, since the kernel makes the scores again; ``frozen`` 1 for weights that
    take no gradient; ``recompute`` what it adds; ``step`` the whole hardware step over its forward.

    >>> from loadmaster.describe.layout import Layout
    >>> ratios = backward_over_forward(
    ...     Model.from_hf("gpt2"), Workload(global_batch_size=1, seq_len=1024), Layout(recompute="full"))
    >>> ratios["linear"], ratios["attention (flash)"], 3.7 < ratios["step"] < 4
    (2.0, 2.5, True)
    """
    step = flops(model, workload, layout)
    tokens = [(b, n, model.seq_len_of(b, workload.seq_len)) for b, n in model.blocks]
    attention = sum(block_flops(b, s, causal=workload.causal).attention * n for b, n, s in tokens)
    hidden = 0.5 * attention * workload.global_batch_size  # the fifth product, half of the forward's two
    return {
        "linear": 2.0 if workload.frozen == "none" else 1.0,
        "attention (flash)": 2.5,
        "frozen": 1.0,
        "recompute": float(step["recompute"] / step["forward"]),
        "attention share of forward": workload.global_batch_size * attention / step["forward"],
        "step": float((step["hardware"] + hidden) / step["forward"]),
    }


def palm_flops_per_token(model: Model, seq_len: int) -> float:
    """6 P + 12 L H s of the PaLM appendix, P all parameters (the look-up too): how many reports count.

    >>> palm_flops_per_token(Model.from_hf("meta-llama/Llama-2-7b-hf"), 4096)
    46872944640.0
    """
    cores = ((b.attention, n) for b, n in model.blocks)
    attention = sum(n * 6.0 * core.num_heads * (core.head_dim + core.v_head_dim) * seq_len for core, n in cores if core)
    return 6.0 * model.num_params + attention


def utilisation(flops_per_second: Any, device: Device, dtype: str, num_devices: int = 1) -> Any:
    """Share of the devices' dense peak, or None where the peak is not known: never another card's.

    >>> from loadmaster.describe.cluster import Cluster
    >>> round(utilisation(420e12, Cluster.parse("h200").device, "bf16"), 4)
    0.4245
    >>> utilisation(1e12, Device(name="mystery", memory_bytes=1, memory_bandwidth=1.0), "bf16") is None
    True
    """
    peak = device.peak(dtype)
    return None if peak is None else flops_per_second / (num_devices * peak)
