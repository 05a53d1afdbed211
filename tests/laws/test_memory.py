"""The memory law against published runs and worked cases."""

from types import SimpleNamespace

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.laws.memory import memory_peak
from loadmaster.units import GIB

LLAMA_70B_12 = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 12,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
OUTSIDE = ("context", "allocator/rounding")


def allocated(peak):
    return sum(v for k, v in peak.terms.items() if k not in OUTSIDE)


@pytest.mark.parametrize(
    ("layout", "measured_gib"),
    [
        ("tp=1,pp=2,dp_shard=4,zero=1", 66.55),
        ("tp=2,dp_shard=4,zero=1,sequence_parallel=true", 60.68),
        ("tp=4,dp_shard=2,zero=1,sequence_parallel=true", 39.07),
        ("tp=8,sequence_parallel=true", 28.29),
    ],
)
def test_megatron_dense_rows_of_simumax(layout, measured_gib):
    layout = lm.Layout.parse(layout)
    workload = lm.Workload(global_batch_size=4 * layout.dp, seq_len=4096, loss="fused")
    model = lm.Model.from_hf(LLAMA_70B_12)
    peak = memory_peak(model, lm.Cluster.parse("8xb200"), workload, layout, lm.Stack.named("megatron"))
    assert allocated(peak) / GIB == pytest.approx(measured_gib, rel=0.002)


def columns(layouts):
    fields = layouts[0].to_dict()
    values = {k: np.array([getattr(x, k) for x in layouts]) for k in fields}
    return SimpleNamespace(**{k: v[0] if isinstance(fields[k], str) else v for k, v in values.items()})


@pytest.mark.parametrize("stack", ["loadmaster", "megatron", "nanotron", "torchtitan", "deepspeed"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_columns_equal_scalars(stack, recompute):
    texts = ["dp_shard=8", "tp=2,pp=2,dp_shard=2,zero=1", "tp=2,pp=4,sequence_parallel=true", "dp_shard=8,zero=3",
             "cp=2,dp_shard=4,zero=2,micro_batch_size=2", "pp=8", "tp=4,pp=2,dp_shard=1"]  # fmt: skip
    layouts = [lm.Layout.parse(f"{t},recompute={recompute}") for t in texts]
    model, cluster = lm.Model.from_hf(LLAMA_70B_12), lm.Cluster.parse("8xh100-sxm")
    workload = lm.Workload(global_batch_size=32, seq_len=4096)
    chosen = lm.Stack.named(stack)
    together = memory_peak(model, cluster, workload, columns(layouts), chosen)
    for i, layout in enumerate(layouts):
        alone = memory_peak(model, cluster, workload, layout, chosen)
        assert together.total[i] == alone.total, layout.describe()
        assert all(isinstance(v, int | np.integer) for v in alone.terms.values())


def test_recompute_never_costs_memory_and_interleaving_never_saves_it():
    model, cluster = lm.Model.from_hf(LLAMA_70B_12), lm.Cluster.parse("8xh100-sxm")
    workload, megatron = lm.Workload(global_batch_size=32, seq_len=4096), lm.Stack.named("megatron")

    def total(text):
        return memory_peak(model, cluster, workload, lm.Layout.parse(text), megatron).total

    base = "tp=2,pp=2,dp_shard=2,zero=1"
    assert total(f"{base},recompute=full") <= total(f"{base},recompute=selective") <= total(base)
    assert total(f"{base},schedule=interleaved_1f1b,virtual_stages=3") > total(base)


def test_tensor_and_pipeline_parallelism_divide_every_dense_matrix_and_its_state():
    model, cluster = lm.Model.from_hf(LLAMA_70B_12), lm.Cluster.parse("8xh100-sxm")
    workload, stack = lm.Workload(global_batch_size=32, seq_len=128), lm.Stack.named("megatron").variant(padded_vocab=0)
    whole = memory_peak(model, cluster, workload, lm.Layout(), stack).terms
    for name in ("parameters", "gradients", "optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        halves = [
            memory_peak(model, cluster, workload, lm.Layout(tp=4, pp=2), stack, stage=i).terms[name] for i in (0, 1)
        ]
        norms = 25 * 8192 * (whole[name] // model.num_params)  # norms are whole on every tp rank
        assert sum(halves) * 4 == whole[name] + 3 * norms
