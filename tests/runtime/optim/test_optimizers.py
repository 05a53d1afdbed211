"""The optimizers against PyTorch's, and against what users met: drift, embeddings, lost updates, small epsilons."""

import pytest
import torch
from torch import nn

from loadmaster.errors import InvalidInput
from loadmaster.runtime import optim

PAIRS = [
    (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_32_bit_state_is_pytorchs_optimizer(ours, theirs, options, kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, 50, generator=generator)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a, b = ours([("p", p)], kernel=kernel, **options), theirs([q], **options)
    for _ in range(10):
        p.grad = torch.randn(100, 50, generator=generator)
        q.grad = p.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_lion_follows_its_paper() -> None:
    p = nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = optim.Lion([("p", p)], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    p.grad = torch.tensor([2.0, -3.0])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([1.0, -1.0]) * (1 - 0.05) - 0.1 * torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.01 * torch.tensor([2.0, -3.0]))


def random_gradient_steps(make, n: int = 1 << 18, steps: int = 20) -> torch.Tensor:
    """Weights after `steps` of standard normal gradients at rate 1e-3."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(0.02 * torch.randn(n, generator=generator))
    optimizer = make(p)
    for _ in range(steps):
        p.grad = torch.randn(n, generator=generator)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_twenty_steps_stay_within_5e_4_of_fp32(kernel) -> None:
    exact = random_gradient_steps(lambda p: torch.optim.AdamW([p], lr=1e-3))
    coded = random_gradient_steps(lambda p: optim.AdamW([("p", p)], lr=1e-3, state_bits=8, kernel=kernel))
    assert (exact - coded).abs().max() < 5e-4


# --- a coordinate without gradient drifts: zero must be a code of its own -------------------------------------------


def affine(x: torch.Tensor) -> torch.Tensor:
    low, high = x.min(), x.max()
    unit = (high - low) / 255
    return x.clone() if unit == 0 else torch.round((x - low) / unit) * unit + low


def drift(code, steps: int = 500) -> float:
    torch.manual_seed(0)
    m, v, p, g = torch.zeros(256), torch.zeros(256), torch.zeros(256), torch.randn(256)
    g[7] = 0.0
    for t in range(1, steps + 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        m = code(m)
    return p[7].item()


def test_a_weight_without_gradient_does_not_move() -> None:
    assert abs(drift(affine)) > 1  # the contrast: an offset code walks off by 4e5
    torch.manual_seed(0)
    g = torch.randn(256)
    g[7] = 0.0
    p = nn.Parameter(torch.zeros(256))
    optimizer = optim.Adam([("p", p)], lr=1e-3, state_bits=8, min_elements=1)
    for _ in range(500):
        p.grad = g.clone()
        optimizer.step()
    assert p[7].item() == 0.0


def test_a_weight_whose_gradient_ends_comes_to_rest() -> None:
    """Rounding to nearest would hold a small first moment for ever; ours decays like the exact one."""
    torch.manual_seed(0)
    p, q = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(4096))
    coded = optim.AdamW([("p", p)], state_bits=8, weight_decay=0.0)
    exact = torch.optim.AdamW([q], weight_decay=0.0)
    for t in range(300):
        p.grad = torch.randn(4096)
        if t >= 50:
            p.grad[::4] = 0.0
        q.grad = p.grad.clone()
        coded.step()
        exact.step()
        if t == 200:
            rest, reference = p.detach().clone(), q.detach().clone()
    assert (p - rest)[::4].abs().max() < 1e-6 + 10 * (q - reference)[::4].abs().max()
    assert coded.state[p]["exp_avg"][::4].count_nonzero() < 20


# --- outliers and tiny second moments -------------------------------------------------------------------------------


def linear_adam(g_of, n: int, steps: int, levels: int = 255) -> torch.Tensor:
    """Adam with plain linear codes of both moments, one scale a block of 256: what fails."""
    m, v, p = torch.zeros(n), torch.zeros(n), torch.zeros(n)

    def linear(x: torch.Tensor, steps: int) -> torch.Tensor:
        scale = x.view(-1, 256).abs().amax(1, keepdim=True).clamp(min=1e-30)
        return (torch.round(x.view(-1, 256) / scale * steps) / steps * scale).flatten()

    for t in range(1, steps + 1):
        g = g_of(t)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        m, v = linear(m, levels // 2), linear(v, levels)
    return p


def test_outliers_and_tiny_second_moments_do_not_diverge() -> None:
    """One gradient in 256 is a hundred times the others, whose v linear codes send to zero."""
    n, steps = 4096, 100

    def gradient(t: int) -> torch.Tensor:
        g = torch.randn(n, generator=torch.Generator().manual_seed(t))
        g[::256] *= 100
        return g

    p, q = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))
    coded, exact = optim.Adam([("p", p)], state_bits=8), torch.optim.Adam([q])
    for t in range(1, steps + 1):
        p.grad, q.grad = gradient(t), gradient(t)
        coded.step()
        exact.step()
    assert p.isfinite().all()
    assert (p - q).abs().max() < 0.05  # weights have moved by up to 0.1
    assert linear_adam(gradient, n, steps).abs().max() > 100


def test_gradients_of_1e_25_move_nothing_and_break_nothing() -> None:
    """Their squares are zero in fp32: m counts as zero too."""
    p = nn.Parameter(torch.ones(4096))
    optimizer = optim.Adam([("p", p)], state_bits=8)
    for _ in range(50):
        p.grad = torch.full((4096,), 1e-25)
        optimizer.step()
    assert (p - 1).abs().max() < 1e-6


def test_second_moments_that_shrink_are_followed() -> None:
    """Gradients of each element fall by up to ten times; rounding to nearest stays 40 % too high."""
    generator = torch.Generator().manual_seed(0)
    n, steps = 1 << 14, 1500
    rate = torch.rand(n, generator=generator)
    p, v = nn.Parameter(torch.zeros(n)), torch.zeros(n)
    optimizer = optim.Adam([("p", p)], lr=0.0, state_bits=8)
    for t in range(steps):
        p.grad = torch.randn(n, generator=generator) * 10 ** (-rate * t / steps)
        v = 0.999 * v + 0.001 * p.grad**2
        optimizer.step()
    from loadmaster.program.codebook import SECOND_MOMENT
    from loadmaster.runtime.optim.codes import decode

    state = optimizer.state[p]
    kept = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], SECOND_MOMENT, 256)
    assert (kept / v).sqrt().mean().item() == pytest.approx(1.0, abs=0.03)


# --- half precision -------------------------------------------------------------------------------------------------


def test_fp16_weights_with_the_default_epsilon_stay_finite() -> None:
    """In pure fp16 eps 1e-8 is zero and small squares vanish: NaN at step one. Moments here are never fp16."""
    p = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float16))
    optimizer = optim.Adam([("p", p)], lr=1e-3, eps=1e-8, state_bits=8, min_elements=1)
    p.grad = torch.tensor([0.0, 1e-4, 1e-2, 1.0], dtype=torch.float16)
    optimizer.step()
    assert p.tolist() == [0.5, 0.4990234375, 0.4990234375, 0.4990234375]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_stochastic_rounding_keeps_updates_bf16_would_lose(kernel) -> None:
    lr = 6e-4
    nearest, stochastic = (nn.Parameter(torch.ones(8192, dtype=torch.bfloat16)) for _ in range(2))
    for p, on in ((nearest, False), (stochastic, True)):
        optimizer = optim.SGD([("p", p)], lr=lr, momentum=1e-9, stochastic_rounding=on, state_bits=8, kernel=kernel)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert nearest.unique().tolist() == [1.0]
    assert stochastic.float().mean().item() == pytest.approx(0.940002, abs=1e-3)


# --- interface ------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, 64)
        self.mlp = nn.Linear(64, 256)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.tokens.weight


def test_embeddings_and_small_tensors_keep_32_bits() -> None:
    model = Tiny()
    for optimizer in (
        optim.AdamW(model, state_bits=8),
        optim.AdamW(model.parameters(), state_bits=8, embeddings=model),
        optim.AdamW(model.parameters(), state_bits=8, embeddings=[model.tokens.weight]),
    ):
        assert not optimizer.is_coded(model.tokens.weight)  # tied to the head: one tensor
        assert not optimizer.is_coded(model.mlp.bias)
        assert optimizer.is_coded(model.mlp.weight)


def test_embeddings_are_told_by_name_where_there_are_only_names() -> None:
    p, q = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    optimizer = optim.AdamW([("model.embed_tokens.weight", p), ("model.up_proj.weight", q)], state_bits=8)
    assert not optimizer.is_coded(p)
    assert optimizer.is_coded(q)


def test_parameters_without_names_are_said_to_hide_embeddings(caplog) -> None:
    optim.AdamW(nn.Linear(64, 64).parameters(), state_bits=8)
    assert "embeddings cannot be told apart" in caplog.text


def test_groups_have_their_own_options() -> None:
    p, q, frozen = (nn.Parameter(torch.ones(64, 64)) for _ in range(3))
    optimizer = optim.AdamW(
        [{"params": [p], "lr": 0.0, "weight_decay": 0.0}, {"params": [q], "state_bits": 32}, {"params": [frozen]}],
        lr=0.1, state_bits=8, embeddings=[],
    )  # fmt: skip
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    assert (p == 1).all()
    assert (q < 1).all()
    assert (frozen == 1).all()
    assert (optimizer.is_coded(p), optimizer.is_coded(q)) == (True, False)
    assert frozen not in optimizer.state


def test_grad_scale_is_the_scaled_gradient() -> None:
    p, q = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    a, b = optim.SGD([("p", p)], state_bits=8), optim.SGD([("q", q)], state_bits=8)
    p.grad, q.grad = torch.full_like(p, 8.0), torch.full_like(q, 2.0)
    a.step(grad_scale=0.25)
    b.step()
    assert torch.equal(p, q)


def test_transposed_parameters_are_stepped() -> None:
    p = nn.Parameter(torch.ones(64, 80).t())
    optimizer = optim.AdamW([("p", p)], state_bits=8)
    p.grad = torch.ones(80, 64)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((80, 64), 1 - 1e-3 - 1e-5))


def test_weights_and_gradients_may_move_between_steps() -> None:
    p, q = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    a, b = optim.AdamW([("p", p)], state_bits=8), optim.AdamW([("q", q)], state_bits=8)
    for t in range(4):
        p.grad = torch.full((64, 64), 1.0 + t)
        q.grad = torch.full((64, 64), 1.0 + t).t().clone().t()  # another memory order
        a.step()
        b.step()
        p.data = p.data.clone()
    assert torch.equal(p, q)
    assert (p < 1).all()


def test_a_learning_rate_tensor_and_a_closure_work() -> None:
    p = nn.Parameter(torch.ones(64, 64))
    optimizer = optim.AdamW([("p", p)], lr=torch.tensor(1e-2), state_bits=8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


REFUSED = [
    ({"state_bits": 4}, "must be 32 or 8"),
    ({"state_bits": 8, "block": 100}, "power of two from 64 to 4096"),
    ({"lr": -1.0}, "must be at least 0"),
    ({"betas": (0.9, 1.0)}, "below 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options_are_refused(options, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        optim.AdamW([("p", nn.Parameter(torch.zeros(8)))], **options)


def test_sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(100, 64, sparse=True)
    optimizer = optim.AdamW(layer, state_bits=8)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidInput, match="must be dense"):
        optimizer.step()


def test_capturable_steps_are_the_same_steps(monkeypatch) -> None:
    """With rates and counts as tensors (what a CUDA graph holds), through Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = []
    for capturable in (False, True):
        p = nn.Parameter(torch.ones(16, 65))
        lr = torch.tensor(1e-2) if capturable else 1e-2
        optimizer = optim.AdamW([("p", p)], lr=lr, state_bits=8, kernel="triton", capturable=capturable, min_elements=1)
        for t in range(3):
            p.grad = torch.randn(16, 65, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-6)
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        assert (a.int() - b.int()).abs().max() <= 1
