"""Legality: refusals name the nearest legal values, and one rule serves a layout and a column of layouts."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.program.dimensions import Dimensions, padded_vocab
from loadmaster.program.legal import RULES, broken, check


def dims(
    *, heads: int = 32, kv: int | None = None, layers: int = 32, vocab: int = 50257, experts: int = 0
) -> Dimensions:
    return Dimensions(
        num_layers=layers, heads=(heads,), kv_heads=(heads if kv is None else kv,), widths=(),
        experts=(experts,) if experts else (), vocab_size=vocab, max_seq_len=None,
    )  # fmt: skip


def work(batch: int = 256) -> Workload:
    return Workload(global_batch_size=batch, seq_len=4096)


def valid(d: Dimensions, limit: int) -> list[int]:
    good = []
    for tp in range(1, limit + 1):
        try:
            check(d, work(), Layout(tp=tp))
        except InvalidInput:
            continue
        good.append(tp)
    return good


def test_tensor_parallel_sizes_that_divide_the_heads() -> None:
    assert valid(dims(heads=28, kv=4), 8) == [1, 2, 4]
    assert valid(dims(heads=52, kv=52), 8) == [1, 2, 4]
    assert valid(dims(heads=52, kv=52), 52) == [1, 2, 4, 13, 26, 52]


def test_a_refused_size_says_why_and_names_the_next() -> None:
    with pytest.raises(InvalidInput, match=r"28 % 8 = 4.*use tp = 1 or 2 or 4"):
        check(dims(heads=28, kv=4), work(), Layout(tp=8))


def test_kv_heads_may_be_replicated() -> None:
    with pytest.raises(InvalidInput, match=r"replicate_kv_heads=true"):
        check(dims(heads=32, kv=2), work(), Layout(tp=8))
    check(dims(heads=32, kv=2), work(), Layout(tp=8, replicate_kv_heads=True))
    with pytest.raises(InvalidInput, match=r"KV heads"):
        check(dims(heads=28, kv=4), work(), Layout(tp=7, replicate_kv_heads=True))


@pytest.mark.parametrize(
    ("batch", "micro", "gpus", "tp", "pp", "expected"),
    [(256, 2, 8, 1, 1, 16), (64, 4, 16, 4, 2, 8)],
)
def test_accumulation_steps(batch: int, micro: int, gpus: int, tp: int, pp: int, expected: int) -> None:
    layout = Layout(dp_shard=gpus // (tp * pp), tp=tp, pp=pp, micro_batch_size=micro)
    check(dims(), work(batch), layout, Cluster.parse(f"{gpus}xh100-sxm"))
    assert layout.num_micro_batches(work(batch)) == expected


def test_a_global_batch_that_no_accumulation_reaches() -> None:
    with pytest.raises(InvalidInput, match=r"252 or 266.*8 devices \(16 micro-batches\)"):
        check(dims(), work(256), Layout(dp_shard=7, micro_batch_size=2), Cluster.parse("7xh100-sxm"))


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (151669, 4, 152064)]
)
def test_vocabulary_is_padded(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab(vocab, tp) == rows


def test_vocabulary_without_padding_must_divide() -> None:
    with pytest.raises(InvalidInput, match=r"50257 % 2 = 1"):
        check(dims(vocab=50257), work(), Layout(tp=2, vocab_padding=1))


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        (Layout(pp=64), "32 layers"),
        (Layout(pp=4, schedule="interleaved_1f1b"), "virtual_stages"),
        (Layout(pp=4, virtual_stages=2), "interleaved_1f1b"),
        (Layout(pp=4, schedule="zb_v"), "2 for zb_v"),
        (Layout(pp=3, dp_shard=1, virtual_stages=2, schedule="interleaved_1f1b"), "divide the 256 micro-batches"),
        (Layout(ep=2, dp_shard=2), "dense"),
        (Layout(cp=3), "half the sequence"),
    ],
)
def test_refusals(layout: Layout, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        check(dims(), work(), layout)


def test_degrees_must_use_every_device() -> None:
    with pytest.raises(InvalidInput, match=r"16 devices.*multiply to 8; use dp_shard = 2"):
        check(dims(), work(), Layout(tp=8), Cluster.parse("16xh100-sxm"))


def test_experts_lie_inside_the_data_ranks() -> None:
    check(dims(experts=8), work(), Layout(ep=4, dp_shard=4))
    with pytest.raises(InvalidInput, match="8 experts"):
        check(dims(experts=8), work(), Layout(ep=16, dp_shard=16))
    with pytest.raises(InvalidInput, match=r"dp_replicate \* dp_shard \* cp = 2"):
        check(dims(experts=8), work(), Layout(ep=4, dp_shard=2))


DEGREE = st.integers(1, 16)


@given(
    tp=DEGREE, pp=DEGREE, cp=DEGREE, dp=DEGREE, ep=DEGREE, micro=DEGREE, v=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]),
    kv=st.sampled_from([1, 2, 8]), replicate=st.booleans(),
)  # fmt: skip
def test_columns_refuse_what_one_layout_refuses(
    tp: int, pp: int, cp: int, dp: int, ep: int, micro: int, v: int, schedule: str, kv: int, replicate: bool
) -> None:
    layout = Layout(
        tp=tp, pp=pp, cp=cp, dp_shard=dp, ep=ep, micro_batch_size=micro, virtual_stages=v if pp > 1 else 1,
        schedule=schedule, replicate_kv_heads=replicate,
    )  # fmt: skip
    columns = SimpleNamespace(**{k: np.array([n, n]) if isinstance(n, int) else n for k, n in layout.to_dict().items()})
    d, cluster = dims(kv=kv, experts=8), Cluster.parse("16xh100-sxm")
    bad = any(bool(np.any(mask)) for mask in broken(d, work(), columns, cluster).values())
    try:
        check(d, work(), layout, cluster)
    except InvalidInput:
        assert bad
    else:
        assert not bad


def test_rules_are_named_once() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
