"""What a timeline says: phases, categories, who saved what, and refusals instead of wrong numbers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loadmaster.errors import InvalidInput
from loadmaster.trace.api import trace
from loadmaster.trace.timeline import Category
from loadmaster.trace.tracer import Untraceable


def test_peak_moves_to_the_optimizer_under_full_checkpointing_with_foreach_adamw(zoo):
    plain = trace(zoo.gpt2, recompute="none", foreach=False)
    moved = trace(zoo.gpt2, recompute="full", foreach=True)
    assert plain.peak.event.phase == "backward 2"
    assert moved.peak.event.phase == "optimizer"
    assert "_foreach_sqrt" in str(moved.peak.event)
    parameters = moved.peak.by_category["parameter"]
    assert moved.peak.ledger["optimizer/temporaries"] == parameters  # one more copy of all of them


def test_terms_sum_to_the_peak_and_every_storage_ends(zoo):
    step = trace(zoo.llama)
    assert step.peak.ledger.total == step.peak.bytes == int(step.live_bytes.max())
    for sums in (step.peak.by_category, step.peak.by_module, step.peak.by_op):
        assert sum(sums.values()) == step.peak.bytes
    kept = {s.category for s in step.storages if s.death is None}
    assert kept <= {Category.PARAMETER, Category.BUFFER, Category.INPUT, Category.OPTIMIZER}


def test_series_sums_to_the_live_bytes(zoo):
    step = trace(zoo.shared)
    _, series = step.series()
    total = sum(series.values())
    assert int(total.max()) == step.peak_bytes
    assert all((row >= 0).all() for row in series.values())


def test_module_and_op_of_saved_tensors():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = trace(net, torch.zeros(3, 8), optimizer="sgd")
    assert step.saved_bytes() == 3 * 16 * 4  # the ReLU's output, saved by itself and by the second layer
    (saved,) = step.saved()
    assert saved.saved_by == "1 (aten.relu)"
    assert step.events[saved.birth].module == "1"
    backward = [e for e in step.events if e.phase == "backward" and e.op == "aten.threshold_backward"]
    assert [(e.module, e.source) for e in backward] == [("1", "aten.relu")]


def test_eight_checkpointed_linears_keep_what_plain_ones_keep():
    """A checkpoint around each layer keeps its input, as the layer does; one around all keeps one (case 5.1)."""

    class Net(nn.Module):
        def __init__(self, mode):
            super().__init__()
            self.mode, self.layers = mode, nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

        def run(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

        def forward(self, x):
            x = x.requires_grad_()
            if self.mode == "each":
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
            elif self.mode == "all":
                x = checkpoint(self.run, x, use_reentrant=False)
            else:
                x = self.run(x)
            return x

    def held(mode):
        step = trace(Net(mode), torch.zeros(137, 256), optimizer="sgd", steps=1)
        inputs = sum(s.bytes for s in step.storages if s.category is Category.INPUT)
        return step.saved_bytes() + inputs

    assert (held("none"), held("each"), held("all")) == (1122304, 1122304, 140288)


def test_user_held_tensors_are_temporaries_once_autograd_lets_go():
    kept = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x).tanh()
            kept.append(h.detach())
            return self.b(h)

    step = trace(Net(), torch.zeros(2, 4), optimizer="sgd", steps=1)
    kept.clear()
    held = next(s for s in step.storages if s.saved_by.startswith("(aten.tanh)"))
    assert held.saved_until is not None
    assert held.death is None
    assert held.category_at(len(step.events)) is Category.TEMPORARY


def test_autocast_casts_a_weight_once_and_drops_it_at_the_end():
    net = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)})

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net["a"]

        def forward(self, x):
            return self.inner(self.inner(x))

    step = trace(Twice(), torch.zeros(2, 64), optimizer="sgd", precision="bf16-mixed", steps=1)
    casts = [s for s in step.storages if s.shape == (64, 64) and s.dtype == "bfloat16" and s.category != "gradient"]
    forward = [s for s in casts if step.events[s.birth].phase == "forward"]
    assert len(forward) == 1


def test_storage_resizing_is_booked():
    class Freed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            gathered = torch.empty(1000)
            gathered.untyped_storage().resize_(0)
            y = self.a(x)
            gathered.untyped_storage().resize_(8000)
            return y

    step = trace(Freed(), torch.zeros(1, 8), optimizer="sgd", steps=1)
    changes = [
        int(b) for s, b in zip(step.delta_storage, step.delta_bytes, strict=True) if step.storages[s].bytes == 8000
    ]
    assert changes == [4000, -4000, 8000, -8000]


@pytest.mark.parametrize("where", ["item", "bool", "nonzero", "mask"])
def test_what_depends_on_data_is_refused_by_name(where):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            match where:
                case "item":
                    return y * y.max().item()
                case "bool":
                    return y if (y > 0).all() else -y
                case "nonzero":
                    return y[y.nonzero()[:, 0]]
                case _:
                    return y[y > 0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Branch()

        def forward(self, x):
            return self.block(x)

    with pytest.raises(Untraceable, match=r"module block, op aten\.\S+: its result depends on the elements"):
        trace(Outer(), torch.zeros(2, 4))
    assert trace(Outer(), torch.ones(2, 4), real=True, optimizer="sgd").peak_bytes > 0


def test_a_swallowed_refusal_is_raised_after_all():
    class Swallows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            try:
                return y * float(y.sum())
            except ValueError:
                return y

    with pytest.raises(Untraceable, match="_local_scalar_dense"):
        trace(Swallows(), torch.zeros(2, 4))


def test_data_dependent_routing_of_experts_is_refused(zoo):
    with pytest.raises(Untraceable, match=r"model\.layers\.0\.mlp\.experts"):
        trace(zoo.mixtral_eager)


def test_values_that_follow_from_shapes_are_known():
    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            positions = torch.arange(x.shape[0])
            mask = positions >= 1
            assert mask.any()
            assert int(positions.max()) == x.shape[0] - 1
            return self.inner(x[mask])

    step = trace(Lengths(), torch.zeros(5, 4), optimizer="sgd", steps=1)
    assert any(s.shape == (4, 4) and step.events[s.birth].op == "aten.index.Tensor" for s in step.storages)


def test_a_module_is_traced_on_a_copy():
    net = nn.Linear(4, 4)
    before = net.weight.clone()
    trace(net, torch.zeros(2, 4))
    assert torch.equal(net.weight, before)
    assert net.weight.grad is None


def test_refusals():
    with pytest.raises(InvalidInput, match="precision"):
        trace(nn.Linear(4, 4), torch.zeros(2, 4), precision="int3")
    with pytest.raises(InvalidInput, match="optimizer = lamb"):
        trace(nn.Linear(4, 4), torch.zeros(2, 4), optimizer="lamb")
    with pytest.raises(InvalidInput, match="no repeated blocks"):
        trace(nn.Linear(4, 4), torch.zeros(2, 4), recompute="full")
    with pytest.raises(Untraceable, match=r"module 0, op aten.addmm"):
        trace(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 5))
    with pytest.raises(InvalidInput, match="no trainable parameter"):
        trace(nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4))


def test_remembered_plans_change_nothing(zoo):
    """The trace that asks fake tensors anew for every op equals the one that remembers, change by change."""
    from loadmaster.trace.ghost import Plans, shared_plans

    shared_plans.cache_clear()
    quick = trace(zoo.bert, steps=1)
    find = Plans.find
    try:
        Plans.find = lambda self, func, key, args, kwargs: self._ask(func, args, kwargs)
        slow = trace(zoo.bert, steps=1)
    finally:
        Plans.find = find
    for name in ("delta_event", "delta_storage", "delta_bytes"):
        assert getattr(quick, name).tolist() == getattr(slow, name).tolist()
    assert quick.storages == slow.storages


def test_ghosts_and_real_tensors_are_traced_alike(zoo):
    """The same tracer over real tensors books the same bytes at the same ops."""
    ghostly, real = trace(zoo.vit, steps=1), trace(zoo.vit, steps=1, real=True)
    assert ghostly.peak_bytes == real.peak_bytes
    assert ghostly.peak.event.op == real.peak.event.op
    assert ghostly.saved_bytes() == real.saved_bytes()


def test_the_package_is_the_function():
    import loadmaster as lm

    assert lm.trace(nn.Linear(4, 4), torch.zeros(2, 4), optimizer="sgd").peak_bytes > 0
