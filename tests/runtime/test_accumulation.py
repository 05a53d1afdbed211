"""Accumulation on one process: public worked cases, and the invariances that catch them all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.errors import InvalidInput
from loadmaster.laws.accumulation import mean_of_means, optimizer_steps, window_loss, wrong_ratio
from loadmaster.program.buckets import buckets_of, num_elements
from loadmaster.program.params import ParameterTable
from loadmaster.program.window import split_into_windows, window_actions
from loadmaster.runtime import OptimizerConfig, build
from loadmaster.runtime.norm import clip_factor, sum_of_squares

VOCAB = 23
LENGTHS = (4, 9, 12, 2, 7, 11)


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids):
        return self.head(self.table(input_ids).tanh())


def padded(lengths, width=13):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    labels = torch.where(torch.arange(width)[None] < torch.tensor(lengths)[:, None], ids, -100)
    return ids, labels


def micro_batches(size, lengths=LENGTHS):
    ids, labels = padded(lengths)
    return [{"input_ids": ids[i : i + size], "labels": labels[i : i + size]} for i in range(0, len(lengths), size)]


def engine(**options):
    return build(Bigram(), Layout(precision="fp32"), optimizer=OptimizerConfig(**options))


def gradients(e):
    return torch.cat([s.tensor for s in e.gradients()])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulation_changes_nothing(size):
    """Six sequences of unequal length as (6, 1), (3, 2), (2, 3) and (1, 6) micro-batches."""
    whole, parts = engine(), engine()
    one, many = whole.step(micro_batches(6)), parts.step(micro_batches(size))
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    assert many.tokens == one.tokens == sum(LENGTHS) - 6
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-5, atol=1e-8)


def test_the_gradient_is_that_of_the_mean_over_tokens():
    ids, labels = padded(LENGTHS)
    module = Bigram()
    logits = module(ids)[:, :-1].flatten(0, 1)
    nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100).backward()
    e = engine()
    e.step(micro_batches(1))
    torch.testing.assert_close(
        gradients(e).sort().values,
        torch.cat([p.grad.flatten() for p in module.parameters()]).sort().values,
        rtol=1e-4,
        atol=1e-7,
    )


def test_a_mean_of_means_is_not_the_mean():
    sums, counts = [10 * 4.0, 1000 * 2.0], [10, 1000]
    assert window_loss(sums, counts) == pytest.approx(2.019802, abs=1e-6)
    assert mean_of_means(sums, counts) == 3.0
    assert window_loss([0.0, 0.0], [0, 0]) is None
    constant = {"loss": lambda m, b: (m.weight.sum() * 0 + b["mean"] * b["tokens"], b["tokens"])}
    e = build(nn.Linear(1, 1), Layout(precision="fp32"), count=lambda b: b["tokens"], **constant)
    window = [{"mean": 4.0, "tokens": 10}, {"mean": 2.0, "tokens": 1000}]
    assert e.step(window).loss == pytest.approx(2.019802, abs=1e-6)


def test_the_usual_mistakes_have_the_accumulation_count_as_their_ratio():
    assert wrong_ratio(2, "not divided") == 2.0
    assert wrong_ratio(5, "divided twice") == pytest.approx(1 / 5)
    batch = micro_batches(1, (13,) * 4)
    assert engine().step(batch[:4]).loss == pytest.approx(sum(engine().step([b]).loss for b in batch) / 4, rel=1e-6)


def test_a_count_over_two_micro_batches_lies_within_their_tokens():
    tokens = 2 * 4 * 896
    assert 3585 <= 4390 <= 7168 == tokens


@pytest.mark.parametrize(("batches", "accumulation", "windows"), [(10, 4, (4, 4, 2)), (3, 4, (3,)), (8, 4, (4, 4))])
def test_the_last_window_is_as_short_as_it_is(batches, accumulation, windows):
    assert split_into_windows(batches, accumulation) == windows
    assert optimizer_steps(batches, accumulation) == len(windows)


def test_a_short_last_window_is_divided_by_what_it_holds():
    batches = micro_batches(1) + micro_batches(1)[:4]
    e, scheduler_steps = engine(lr=0.0), 0
    schedule = torch.optim.lr_scheduler.LambdaLR(e.optimizer, lambda step: 1.0)
    results = []
    start = 0
    for length in split_into_windows(10, 4):
        results.append(e.step(batches[start : start + length]))
        schedule.step()
        start, scheduler_steps = start + length, scheduler_steps + 1
    assert len(results) == scheduler_steps == e.step_count == 3
    alone = engine(lr=0.0).step(batches[8:])
    assert results[-1].loss == alone.loss
    assert results[-1].grad_norm == alone.grad_norm


def test_no_accumulation_of_zero():
    with pytest.raises(InvalidInput, match="must be at least 1"):
        split_into_windows(10, 0)


def test_a_micro_batch_alone_is_no_window():
    with pytest.raises(InvalidInput, match="must be a list of micro-batches"):
        engine().step(micro_batches(1)[0])


def test_no_counted_token_no_step():
    e = engine()
    before = [p.detach().clone() for p in e.module.parameters()]
    for window in ([], micro_batches(1, (0, 0))):
        result = e.step(window)
        assert result.skipped
        assert (result.loss, result.grad_norm) == (0.0, 0.0)
        assert "no token" in result.reason
    assert all(torch.equal(a, b) for a, b in zip(before, e.module.parameters(), strict=True))


def test_layers_that_depend_on_the_micro_batch_are_named():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"1: BatchNorm1d normalises over its micro-batch alone"):
        e = build(module, Layout(precision="fp32"), loss=lambda m, b: (m(b["x"]).sum(), 1), count=lambda b: 1)
    assert list(e.findings) == ["1"]


def test_norms_of_shards_and_replicas():
    """Sharded parts add over their group, replicated parts count once; never each rank by its own shard."""
    assert sum_of_squares([torch.tensor([3.0])]) + sum_of_squares([torch.tensor([4.0])]) == 25.0
    sharded, replicated = 9.0, 16.0
    assert (sharded + replicated) ** 0.5 == 5.0
    assert clip_factor(0.8, 1.0) == 1.0
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2)


@given(st.integers(0, 2000))
@settings(deadline=None, max_examples=30)
def test_the_sum_of_squares_is_that_of_fp64(numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert sum_of_squares([x]) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3))
def test_every_rank_takes_part_in_every_reduction(mine, extra, zero):
    most = mine + extra
    actions = window_actions(mine, most, zero=zero)
    reductions = sum(a.reduce for a in actions)
    assert [a.kind for a in actions] == ["F", "B"] * (len(actions) // 2)
    assert sum(not a.fill for a in actions if a.kind == "F") == mine
    if zero >= 2:
        assert reductions == most
    elif mine:
        assert reductions == 1


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB,
        tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip

    def make():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    return make


@pytest.mark.parametrize("kind", ["chunked", "fused"])
def test_losses_without_whole_logits_are_the_same_loss(llama, kind):
    layout = Layout(precision="fp32")
    plain, other = build(llama(), layout), build(llama(), layout, loss=kind)
    other._loss.chunk = 10
    a, b = plain.step(micro_batches(2)), other.step(micro_batches(2))
    assert b.loss == pytest.approx(a.loss, rel=1e-6)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)


def test_losses_without_whole_logits_need_a_plain_head(llama):
    with pytest.raises(Exception, match=r"workload.loss = chunked: does not apply"):
        build(Bigram(), Layout(precision="fp32"), loss="chunked").step(micro_batches(1))
    with pytest.raises(InvalidInput, match="is not known"):
        build(llama(), Layout(precision="fp32"), loss="hinge")


def test_contrastive_losses_are_named():
    class ContrastiveLoss(nn.Module):
        pass

    with pytest.warns(UserWarning, match="fewer negatives"):
        e = build(nn.ModuleList([ContrastiveLoss(), nn.Linear(1, 1)]), Layout(precision="fp32"))
    assert list(e.findings) == ["0"]


def test_buckets_that_are_a_second_copy_would_cost_four_bytes_a_parameter():
    """GPT-2 XL: 6,230,444,800 bytes beside the gradients; 0 where they are views, as here."""
    table = ParameterTable.from_model(Model.from_hf("gpt2-xl"))
    assert 4 * table.num_params == 6230444800
    e = engine()
    e.step(micro_batches(3))
    ledger = e.memory_ledger()
    assert ledger["gradients"] == 4 * num_elements(buckets_of(e.assembly.table, e.layout))
    assert "buffers/buckets" not in ledger.terms
    assert all(p.grad is None for p in e.module.parameters())


def test_a_parameter_without_a_gradient_is_left_alone():
    """As in PyTorch, where it has no .grad: no weight decay, no momentum."""

    class Partly(Bigram):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(3, 3)

    e = build(Partly(), Layout(precision="fp32"), optimizer=OptimizerConfig(weight_decay=0.5))
    before = [p.detach().clone() for p in e.module.spare.parameters()]
    e.step(micro_batches(3))
    assert all(torch.equal(a, b) for a, b in zip(before, e.module.spare.parameters(), strict=True))
    assert len(e.optimizer.state) == len(list(e.module.parameters())) - 2
