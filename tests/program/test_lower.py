"""A lowered layout: every layer, parameter and micro-batch once."""

import pytest

from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.program.lower import lower
from loadmaster.program.shards import fullest_rank, owned_elements

MODEL = Model.from_hf("gpt2")
WORK = Workload(global_batch_size=16, seq_len=128)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4, zero=1, recompute="blocks", recompute_blocks=2),
        Layout(dp_shard=2, dp_replicate=2, zero=3, recompute="full"),
        Layout(pp=5, dp_replicate=2, recompute="full"),
        Layout(pp=2, virtual_stages=3, schedule="interleaved_1f1b"),
    ],
)
def test_everything_is_placed_once(layout: Layout) -> None:
    program = lower(MODEL, WORK, layout)
    assert [i for s in program.stages for i in range(s.start, s.stop)] == list(range(MODEL.num_layers))
    assert program.params.num_params == MODEL.num_params
    assert sum(r.numel for rank in program.shards for r in rank) == MODEL.num_trainable_params
    assert {a.micro_batch for a in program.window} == set(range(layout.num_micro_batches(WORK)))
    recomputed = [i for layers in program.segments.values() for i in layers]
    assert len(set(recomputed)) == len(recomputed)
    if layout.recompute == "full":
        assert sorted(recomputed) == list(range(MODEL.num_layers))


def test_an_illegal_layout_is_not_lowered() -> None:
    with pytest.raises(InvalidInput, match="12 layers"):
        lower(MODEL, WORK, Layout(pp=16))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("zero", [1, 3])
def test_the_fullest_rank_owns_most(shards: int, zero: int) -> None:
    buckets = [b for b in lower(MODEL, Workload(global_batch_size=shards, seq_len=8), Layout(dp_shard=shards, zero=zero)
                                ).buckets if b.trainable]  # fmt: skip
    own = [owned_elements(buckets, rank) for rank in range(shards)]
    assert own[fullest_rank(buckets, shards)] == max(own)
    assert own.index(max(own)) == fullest_rank(buckets, shards)
