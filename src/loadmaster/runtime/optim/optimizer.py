"""The optimizers' common part: one interface for 32- and 8-bit state, whole or sharded, on whichever kernel runs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import DEFAULT_BLOCK, MIN_ELEMENTS, check_block, looks_like_embedding, num_blocks
from loadmaster.runtime.optim import kernel
from loadmaster.runtime.optim.codes import code_dtype, mix
from loadmaster.runtime.optim.rules import MOMENTS, Rule, Scalars
from loadmaster.runtime.optim.shard import ParameterShard, embedding_parameters, local_part, shard_of
from loadmaster.runtime.optim.state import check_groups, load_parameter
from loadmaster.runtime.optim.work import Moment, Work

__all__ = ["Blockwise", "Params"]

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
_log = logging.getLogger(__name__)


class Blockwise(torch.optim.Optimizer):
    """Base of the optimizers.

    Args:
        params: a module (embeddings and names are then known), or what any PyTorch optimizer takes.
        defaults: the rule's options; a group may set its own, `state_bits` among them.
        state_bits: 32, or 8 for blockwise codes.
        block: elements a scale, a power of two from 64 to 4096.
        min_elements: parameters with fewer keep 32-bit state.
        embeddings: modules or tensors whose weights are embeddings and keep 32-bit state.
        shards: where each tensor lies in its whole parameter, if it is a part of one.
        stochastic_rounding: write bf16 weights stochastically, so that no fp32 master copy is needed.
        kernel: ``auto``, ``native``, ``triton`` or ``reference``.
        seed: of the rounding; equal seeds give equal runs, whatever the sharding.
        capturable: step counts and rates stay on the device, so that a CUDA graph can hold the step.
    """

    rule: ClassVar[Rule]

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        state_bits: int = 32,
        block: int = DEFAULT_BLOCK,
        min_elements: int = MIN_ELEMENTS,
        embeddings: nn.Module | Iterable[nn.Module] | Iterable[Tensor] | None = None,
        shards: Mapping[Tensor, ParameterShard] | None = None,
        stochastic_rounding: bool = False,
        kernel: str = "auto",
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        self.block, self.min_elements, self.seed = check_block(block), min_elements, seed
        self.stochastic_rounding, self.kernel, self.capturable = stochastic_rounding, kernel, capturable
        self.shards = dict(shards or {})
        self._works: dict[Tensor, Work] = {}
        self.embeddings = _embeddings(params, embeddings)
        self._knows_names = isinstance(params, nn.Module) or embeddings is not None or bool(shards)
        groups: Any = list(params.named_parameters()) if isinstance(params, nn.Module) else params
        super().__init__(groups, {**defaults, "state_bits": state_bits, "block": block})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its `state_bits` must be 32 or 8 and shards must lie on the block grid."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["state_bits"] not in (32, 8):
            raise InvalidInput("optimizer.state_bits", group["state_bits"], "must be 32 or 8", "use 8 for coded state")
        if group["block"] != self.block:
            raise InvalidInput("optimizer.block", group["block"], f"differs from {self.block}", "use one block size")
        if group["state_bits"] == 8 and not self._knows_names and "param_names" not in group:
            _log.warning("parameters came without names: embeddings cannot be told apart and get 8-bit state; "
                         "pass the module, named_parameters() or embeddings=...")  # fmt: skip
        names = group.get("param_names") or [""] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            self._register(p, name, coded=group["state_bits"] == 8)

    def _register(self, p: Tensor, name: str, *, coded: bool) -> None:
        if p not in self.shards:
            known = p in self.embeddings or looks_like_embedding(name)
            self.shards[p] = shard_of(p, name, is_embedding=known, may_code=coded)
        shard, held = self.shards[p], local_part(p).numel()
        if shard.numel != held:
            raise InvalidInput(
                f"shard of {shard.name}", f"[{shard.start}, {shard.stop})", f"is not the tensor's {held} elements",
                "give the range the tensor holds",
            )  # fmt: skip
        if coded and shard.coded(self.min_elements):
            shard.check_grid(self.block)

    def is_coded(self, p: Tensor) -> bool:
        """Whether the state of parameter `p` is 8-bit."""
        bits = next(g["state_bits"] for g in self.param_groups if any(p is q for q in g["params"]))
        return bool(bits == 8 and self.shards[p].coded(self.min_elements))

    def scalars(self, group: dict[str, Any], step: float | Tensor) -> Scalars:
        """The numbers of step `step` (from 1) of a group."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: recomputes the loss, as in PyTorch.
            grad_scale: multiplies every gradient first (unscaling, clipping), without a pass of its own.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = [work for group in self.param_groups for work in self._group_works(group, grad_scale)]
        kernel.run(works, self.kernel)
        for work in works:
            if work.original is not None:  # not contiguous: stepped in a copy
                work.original.copy_(work.param.view(work.original.shape))
        return loss

    def _group_works(self, group: dict[str, Any], grad_scale: float) -> Iterator[Work]:
        """The work of every parameter of a group; numbers are made once for each step count in it."""
        ready: dict[float, tuple[Scalars, int]] = {}
        sign = -grad_scale if group.get("maximize") else grad_scale
        for p in group["params"]:
            if p.grad is None or self.shards[p].numel == 0:
                continue
            work = self._work_of(group, p)
            work.grad = self._gradient(p)
            work.step += 1
            if self.capturable:
                work.scalars = self._scaled(group, work.step, sign)
            else:
                count = work.step.item()
                if count not in ready:
                    ready[count] = (self._scaled(group, count, sign), mix(mix(self.seed) + int(count)))
                work.scalars, work.key = ready[count]
            yield work

    def _scaled(self, group: dict[str, Any], count: float | Tensor, sign: float) -> Scalars:
        scalars = self.scalars(group, count)
        return scalars if sign == 1.0 else dataclasses.replace(scalars, grad_scale=sign)

    def _gradient(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        grad = local_part(p.grad)
        if grad.is_sparse or grad.is_complex():
            raise InvalidInput(
                f"gradient of {self.shards[p].name or 'a parameter'}", grad.layout if grad.is_sparse else grad.dtype,
                "must be dense and real", "use torch.optim.SparseAdam for that parameter, or sparse=False",
            )  # fmt: skip
        return grad if grad.is_contiguous() else grad.contiguous()

    def _work_of(self, group: dict[str, Any], p: Tensor) -> Work:
        """What stays the same from step to step, made anew where the weight or its state lies elsewhere."""
        state, local = self.state[p] or self._initialise(group, p), local_part(p)
        kept = self._works.get(p)
        if kept is not None and kept.pointer == local.data_ptr() and kept.original is None:
            names = MOMENTS[self.rule]
            if kept.step is state["step"] and all(
                m.data is state[n] for m, (n, _) in zip(kept.moments, names, strict=True)
            ):
                return kept
        flat = local.detach().reshape(-1)
        work = Work(
            rule=self.rule, param=flat, pointer=local.data_ptr(), grad=flat, scalars=Scalars(), block=self.block,
            moments=[Moment(state[n], state.get(f"{n}_scale")) for n, _ in MOMENTS[self.rule]],
            start=self.shards[p].start, key=0, seed=mix(self.seed), step=state["step"],
            nesterov=bool(group.get("nesterov")), stochastic=self.stochastic_rounding,
            original=None if flat.data_ptr() == local.data_ptr() else local.detach(),
        )  # fmt: skip
        self._works[p] = work
        return work

    def _initialise(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """Zero state of one parameter."""
        state: dict[str, Any] = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if self.capturable else "cpu")
        coded = self.is_coded(p)
        for name, code in MOMENTS[self.rule]:
            dtype = code_dtype(code) if coded else torch.float32
            state[name] = torch.zeros(self.shards[p].numel, dtype=dtype, device=p.device)
            if coded:
                count = num_blocks(self.shards[p].numel, self.block)
                state[f"{name}_scale"] = torch.zeros(count, dtype=torch.float32, device=p.device)
        return state

    def initialise(self) -> None:
        """Make the state of every parameter now; otherwise its first step does."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self._initialise(group, p)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        """Take over a saved state bit by bit: nothing is cast.

        Args:
            state_dict: from `state_dict`, of the same parameters.
            convert: decode or encode where the saved bits or block differ from this optimizer's options.

        Raises:
            InvalidInput: parameters differ, or bits or block differ and `convert` is off.
        """
        check_groups(self, state_dict, convert=convert)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            kept = {"params", "param_names", "state_bits", "block"}
            group.update({k: v for k, v in saved.items() if k not in kept})
            for p, index in zip(group["params"], saved["params"], strict=True):
                self.state.pop(p, None)
                if index in state_dict["state"]:
                    load_parameter(self, group, p, state_dict["state"][index], saved["block"], convert=convert)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state held now, by term: codes or moments under their names, and ``scales``."""
        sums: dict[str, int] = {}
        for state in self.state.values():
            for name, tensor in state.items():
                if name != "step":
                    term = "scales" if name.endswith("_scale") else name
                    sums[term] = sums.get(term, 0) + tensor.numel() * tensor.element_size()
        return sums

    def describe(self) -> str:
        """Which kernel runs, and how many parameters have 8-bit and 32-bit state.

        >>> from loadmaster.runtime.optim import AdamW
        >>> print(AdamW(nn.Linear(64, 64), state_bits=8, kernel="reference").describe())
        AdamW: 8-bit state for 1 tensor (4,096 parameters), 32-bit for 1 (64: small or embedding);
        kernel: reference (PyTorch)
        """
        counts = {True: [0, 0], False: [0, 0]}
        for group in self.param_groups:
            for p in group["params"]:
                entry = counts[self.is_coded(p)]
                entry[0], entry[1] = entry[0] + 1, entry[1] + self.shards[p].numel
        (coded, many), (plain, few) = counts[True], counts[False]
        first = next((p for g in self.param_groups for p in g["params"]), None)
        runs = kernel.name(self.kernel, first.device.type if first is not None else "cpu")
        return (
            f"{type(self).__name__}: 8-bit state for {coded} tensor{'s' * (coded != 1)} ({many:,} parameters), "
            f"32-bit for {plain} ({few:,}: small or embedding); kernel: {runs}"
        )


def _embeddings(params: Params, given: Any) -> set[Tensor]:
    """Embedding weights named by a module, by modules or by tensors."""
    found = embedding_parameters(params) if isinstance(params, nn.Module) else set()
    for item in [given] if isinstance(given, nn.Module | Tensor) else list(given or ()):
        found |= embedding_parameters(item) if isinstance(item, nn.Module) else {item}
    return found
