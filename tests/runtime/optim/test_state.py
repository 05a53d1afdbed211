"""State as data: bit-exact resume, the same on any number of shards, nothing cast, and refusals that say why."""

import pytest
import torch
from torch import nn

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import aligned_ranges
from loadmaster.runtime import optim

SHAPES = {"vector": (1, 1001), "small": (7, 13), "matrix": (66, 256), "odd": (67, 301)}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, t: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1000 * t + len(name)))


def whole(**options):
    params = {name: nn.Parameter(w) for name, w in weights().items()}
    return params, optim.AdamW(list(params.items()), state_bits=8, **options)


def run(params, optimizer, steps) -> None:
    for t in steps:
        for name, p in params.items():
            p.grad = gradient(name, t)
        optimizer.step()


def sharded(ranks: int, start: dict[str, torch.Tensor] | None = None):
    """One optimizer a rank, each over its flat ranges."""
    start = start or weights()
    made = []
    for rank in range(ranks):
        params, shards = {}, {}
        for name, w in start.items():
            a, b = aligned_ranges(w.numel(), ranks)[rank]
            params[name] = nn.Parameter(w.flatten()[a:b].clone())
            shards[params[name]] = optim.ParameterShard(name=name, full_shape=SHAPES[name], start=a, stop=b)
        made.append((params, shards, optim.AdamW(params.values(), state_bits=8, shards=shards)))
    return made


def run_sharded(made, steps) -> None:
    for t in steps:
        for params, shards, optimizer in made:
            for name, p in params.items():
                p.grad = gradient(name, t).flatten()[shards[p].start : shards[p].stop].clone()
            optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_state_and_weights_are_equal_whole_and_sharded(ranks: int) -> None:
    params, optimizer = whole()
    run(params, optimizer, range(5))
    made = sharded(ranks)
    run_sharded(made, range(5))
    for name, p in params.items():
        assert torch.equal(torch.cat([s[0][name] for s in made]), p.flatten())
        for kind, tensor in optimizer.state[p].items():
            if kind != "step":
                parts = [o.state[q[name]][kind] for q, _, o in made if q[name].numel()]
                assert torch.equal(torch.cat(parts), tensor)
    total = sum(sum(o.state_bytes().values()) for _, _, o in made)
    assert total == sum(optimizer.state_bytes().values())


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 1), (2, 3), (3, 4)])
def test_resume_on_another_number_of_ranks_is_bit_exact(before: int, after: int, tmp_path) -> None:
    params, optimizer = whole()
    run(params, optimizer, range(8))

    made = sharded(before)
    run_sharded(made, range(5))
    files = [tmp_path / f"{r}.safetensors" for r in range(before)]
    for path, (_, _, o) in zip(files, made, strict=True):
        optim.save_state(o, path)
    middle = {n: torch.cat([q[n] for q, _, _ in made]).detach().reshape(SHAPES[n]) for n in SHAPES}
    again = sharded(after, middle)
    for _, _, o in again:
        optim.load_state(o, files)
    run_sharded(again, range(5, 8))
    for name, p in params.items():
        assert torch.equal(torch.cat([q[name] for q, _, _ in again]), p.flatten())


def test_resume_through_a_state_dict_is_bit_exact() -> None:
    params, optimizer = whole(lr=3e-3)
    run(params, optimizer, range(3))
    others = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    resumed = optim.AdamW(list(others.items()), state_bits=8)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 3e-3
    run(params, optimizer, range(3, 6))
    run(others, resumed, range(3, 6))
    for name, p in params.items():
        assert torch.equal(others[name], p)
        for kind, tensor in optimizer.state[p].items():
            assert torch.equal(resumed.state[others[name]][kind], tensor)


def test_loading_never_casts_and_keeps_bf16_out_of_the_scales() -> None:
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = optim.AdamW([("p", p)], state_bits=8)
    p.grad = torch.randn(64, 64).to(torch.bfloat16)
    optimizer.step()
    q = nn.Parameter(p.detach().clone())
    other = optim.AdamW([("p", q)], state_bits=8)
    other.load_state_dict(optimizer.state_dict())
    for kind, tensor in optimizer.state[p].items():
        assert other.state[q][kind].dtype is tensor.dtype
        assert torch.equal(other.state[q][kind], tensor)


def test_bits_that_disagree_are_refused_and_converted_on_request() -> None:
    params, optimizer = whole()
    run(params, optimizer, range(3))
    saved = optimizer.state_dict()
    others = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    plain = optim.AdamW(list(others.items()), state_bits=32)
    with pytest.raises(InvalidInput, match=r"state_bits = 8: disagrees with the optimizer's state_bits=32"):
        plain.load_state_dict(saved)
    plain.load_state_dict(saved, convert=True)
    assert plain.state[others["matrix"]]["exp_avg"].dtype is torch.float32
    back = optim.AdamW(list(others.items()), state_bits=8)
    back.load_state_dict(plain.state_dict(), convert=True)
    for name, p in params.items():
        for kind, tensor in optimizer.state[p].items():
            mine = back.state[others[name]][kind]
            if kind.endswith("_scale"):
                torch.testing.assert_close(mine, tensor, rtol=1e-6, atol=0)
            else:
                assert torch.equal(mine, tensor)  # decoding and encoding returns every code


def test_another_block_is_refused_and_converted_on_request() -> None:
    params, optimizer = whole()
    run(params, optimizer, range(2))
    others, fine = whole(block=64)
    with pytest.raises(InvalidInput, match=r"block = 256: disagrees with the optimizer's block=64"):
        fine.load_state_dict(optimizer.state_dict())
    fine.load_state_dict(optimizer.state_dict(), convert=True)
    assert fine.state[others["matrix"]]["exp_avg_scale"].numel() == 66 * 4


def test_exemptions_that_disagree_are_named() -> None:
    params, optimizer = whole()
    run(params, optimizer, range(1))
    others = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    strict = optim.AdamW(list(others.items()), state_bits=8, min_elements=10**6)
    with pytest.raises(InvalidInput, match=r"matrix\.exp_avg = 8-bit: but the options make it 32-bit"):
        strict.load_state_dict(optimizer.state_dict())


def test_other_parameters_and_other_optimizers_are_refused(tmp_path) -> None:
    params, optimizer = whole()
    run(params, optimizer, range(1))
    p = nn.Parameter(torch.zeros(8))
    with pytest.raises(InvalidInput, match="other parameters a group"):
        optim.AdamW([("p", p)]).load_state_dict(optimizer.state_dict())
    with pytest.raises(InvalidInput, match="is not the state of a loadmaster optimizer"):
        optim.AdamW([("p", p)]).load_state_dict(torch.optim.AdamW([p]).state_dict())
    path = tmp_path / "state.safetensors"
    optim.save_state(optimizer, path)
    with pytest.raises(InvalidInput, match="is not the state of Lion"):
        optim.load_state(optim.Lion([("p", p)]), path)


def test_a_missing_rank_is_named(tmp_path) -> None:
    made = sharded(2)
    run_sharded(made, range(1))
    path = tmp_path / "0.safetensors"
    optim.save_state(made[0][2], path)
    _, optimizer = whole()
    with pytest.raises(InvalidInput, match="is in none of the files; give the files of every rank"):
        optim.load_state(optimizer, path)


def test_a_range_that_cuts_a_block_is_refused() -> None:
    p = nn.Parameter(torch.zeros(8448 + 1))
    shard = optim.ParameterShard(name="w", full_shape=(66, 256), start=0, stop=8449)
    with pytest.raises(InvalidInput, match="cuts a block of 256 elements at 8449"):
        optim.AdamW([p], state_bits=8, shards={p: shard})
    optim.AdamW([p], state_bits=32, shards={p: shard})


def test_a_shard_of_a_large_tensor_is_coded_however_small_it_is() -> None:
    p = nn.Parameter(torch.zeros(256))
    shard = optim.ParameterShard(name="w", full_shape=(66, 256), start=256, stop=512)
    assert optim.AdamW([p], state_bits=8, shards={p: shard}).is_coded(p)
