"""The training loop of one rank, on one screen; everything it does has a file of its own."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadmaster.errors import InvalidInput
from loadmaster.ledger import Ledger
from loadmaster.ranks import Interrupted
from loadmaster.runtime.data import Sequences, open_sequences
from loadmaster.runtime.engine import Engine, StepResult, build
from loadmaster.runtime.launch import Member, StopRequest, join_run
from loadmaster.runtime.metrics import Metrics, StepRecord
from loadmaster.runtime.modules import build_module, find_blocks, vocab_size
from loadmaster.runtime.optim import Blockwise
from loadmaster.runtime.optimizer import OptimizerConfig
from loadmaster.runtime.outcome import gather_outcome
from loadmaster.runtime.peak import PeakStep
from loadmaster.runtime.progress import RunProgress
from loadmaster.runtime.resume import Position, restore, saved_facts
from loadmaster.runtime.run import Run
from loadmaster.runtime.save import Saver
from loadmaster.runtime.whole import find_checkpoint

__all__ = ["train", "train_rank"]

MEASURED_STEP = 1  # counted from the first of this run: warm, and its peak is that of every later one
HELD_OUT = 0.02  # share of the sequences kept for evaluation, where that is asked for


def train_rank(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of a run, from the payload that the launcher hands to all."""
    run = Run.from_json(payload)
    with join_run(device=run.device) as member, StopRequest(member) as stop:
        return train(run, member, stop)


def train(run: Run, member: Member, stop: StopRequest) -> dict[str, Any]:
    """Train, and return what was measured: ledgers of all ranks, losses, how far it came."""
    _check_world(run, member)
    resumed_from = find_checkpoint(run)
    say = RunProgress(run.steps, quiet=run.quiet or not member.first)
    module = build_module(config=run.config, factory=run.factory, seed=run.seed)
    data, held_out = _open_data(run, member, vocab_size(module))
    blocks = list(find_blocks(module).values()) or None
    engine = build(
        module, run.layout, optimizer=_optimizer(run), device=member.device, blocks=blocks,
        loss=run.workload.loss,
    )  # fmt: skip
    position = restore(resumed_from, run, engine, data.tokens.fingerprint) if resumed_from else Position()
    saver = Saver(run.checkpoints, keep=run.keep, asynchronous=run.asynchronous)
    rate, first = run.learning_rate(), position.step
    _introduce(say, run, data, engine, resumed_from)
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(_metrics(run, first)) if member.first else None
        stack.enter_context(say)
        records: list[StepRecord] = []
        phases: list[Ledger] = []
        peak = PeakStep(engine, member.device, step=min(first + MEASURED_STEP, run.steps - 1))
        while position.step < run.steps and not stop.before(position.step):
            started = time.perf_counter()
            engine.set_lr(rate.at(position.step) / rate.peak)
            _seed(run.seed, position.step, member.rank)
            window = _window(data, run, member, position)
            with peak.around(position.step):
                result = engine.step(window)
            position.step, position.sequence = position.step + 1, position.sequence + run.workload.global_batch_size
            seconds = time.perf_counter() - started
            phases.append(result.seconds)
            last = position.step == run.steps
            eval_loss = None
            if held_out is not None and (position.step % run.eval_every == 0 or last):
                eval_loss = _evaluate(engine, held_out, run, member)
            records.append(
                _record(run, engine, peak, result, position.step, rate.at(position.step - 1), seconds, eval_loss)
            )
            if metrics is not None:
                metrics.write(records[-1])
            say.step(records[-1])
            if run.save_every and position.step % run.save_every == 0 and not last:
                saver.save(position.step, engine.state(), saved_facts(run, engine, position, data.tokens.fingerprint))
        outcome = gather_outcome(engine, peak.ledger(), records, phases, first_step=first)
        if records:
            saver.save(position.step, engine.state(), saved_facts(run, engine, position, data.tokens.fingerprint))
        saver.finish()
    _export(run, member)
    engine.close()
    if position.step < run.steps:
        raise Interrupted(f"stopped after step {position.step} of {run.steps}; saved in {run.checkpoints}")
    return {**outcome, "step": position.step, "entropy": data.tokens.entropy, "tokens": len(data.tokens)}


def _check_world(run: Run, member: Member) -> None:
    if run.layout.world_size != member.world_size:
        raise InvalidInput(
            "WORLD_SIZE", member.world_size,
            f"the plan's layout ({run.layout.describe()}) has {run.layout.world_size} ranks",
            "start as many, or give --layout with other degrees",
        )  # fmt: skip


def _open_data(run: Run, member: Member, ids: int) -> tuple[Sequences, Sequences | None]:
    """Rank 0 encodes the text; the others open what it wrote."""

    def open_it() -> tuple[Sequences, Sequences | None]:
        return open_sequences(
            run.data, run.tokenizer, run.folder / "tokens", seq_len=run.workload.seq_len, vocab_size=ids,
            seed=run.seed, text_field=run.text_field, held_out=HELD_OUT if run.eval_every else 0.0,
        )  # fmt: skip

    found = open_it() if member.first else None
    if member.world_size > 1:
        dist.barrier()
    return found or open_it()


def _optimizer(run: Run) -> OptimizerConfig:
    """Weight decay on matrices alone: vectors are gains and biases."""
    return OptimizerConfig(
        name=run.workload.optimizer, lr=run.lr, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay,
        max_grad_norm=run.clip or None, state_bits=run.layout.optimizer_bits,
        groups=lambda name, tensor: {} if tensor.dim() > 1 else {"weight_decay": 0.0},
    )  # fmt: skip


def _metrics(run: Run, first: int) -> Metrics:
    return Metrics(run.folder, first_step=first, tensorboard=run.tensorboard)


def _seed(seed: int, step: int, rank: int) -> None:
    """Dropout and other draws follow from (seed, step, rank): a resumed run draws the same, with nothing saved."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def _window(data: Sequences, run: Run, member: Member, position: Position) -> list[dict[str, torch.Tensor]]:
    window = data.window(
        position.sequence, global_batch_size=run.workload.global_batch_size, data_rank=member.rank,
        dp=member.world_size, micro_batch_size=run.layout.micro_batch_size,
    )  # fmt: skip
    return [{name: tensor.to(member.device) for name, tensor in batch.items()} for batch in window]


def _evaluate(engine: Engine, held_out: Sequences, run: Run, member: Member) -> float:
    """Mean loss on the same held-out sequences each time, dealt over the ranks."""
    size = max(1, min(run.eval_sequences, held_out.count) // member.world_size) * member.world_size
    window = held_out.window(
        0, global_batch_size=size, data_rank=member.rank, dp=member.world_size,
        micro_batch_size=run.layout.micro_batch_size,
    )  # fmt: skip
    engine.module.eval()
    try:
        return engine.evaluate([{k: t.to(member.device) for k, t in batch.items()} for batch in window])
    finally:
        engine.module.train()


def _record(
    run: Run,
    engine: Engine,
    peak: PeakStep,
    result: StepResult,
    step: int,
    rate: float,
    seconds: float,
    eval_loss: float | None,
) -> StepRecord:
    speed = run.flops_per_step / seconds / run.layout.world_size
    return StepRecord(
        step=step, loss=result.loss, grad_norm=result.grad_norm, tokens=round(result.tokens),
        tokens_per_second=run.workload.tokens / seconds,
        mfu=speed / run.peak_flops if run.peak_flops and speed else None,
        memory_bytes=int(engine.memory_ledger().total), peak_bytes=int(peak.ledger().total),
        loss_scale=result.loss_scale if engine.scaler else None, seconds=seconds, learning_rate=rate,
        flops_per_second=speed, skipped=result.skipped, eval_loss=eval_loss,
    )  # fmt: skip


def _introduce(say: RunProgress, run: Run, data: Sequences, engine: Engine, resumed_from: Path | None) -> None:
    tokens = data.tokens
    batch = f"{run.workload.global_batch_size} sequences of {run.workload.seq_len} tokens a step"
    say.say(f"{run.name}: {run.layout.describe()}; {batch}")
    say.say(
        f"data: {len(tokens):,} tokens of {tokens.num_documents:,} documents from {run.data}; "
        f"unigram entropy {tokens.entropy:.3f} nats a token"
    )
    if isinstance(engine.optimizer, Blockwise):
        say.say(f"optimizer of rank 0: {engine.optimizer.describe()}")
    if run.peak_flops is None:
        say.say("MFU is not shown: the peak of this device is neither known nor measured (loadmaster measure does)")
    for name, effect in engine.findings.items():
        say.say(f"note: {name}: {effect}")
    if resumed_from is not None:
        say.say(f"resumed from {resumed_from}")


def _export(run: Run, member: Member) -> None:
    if run.export_hf is not None and member.first:
        from loadmaster.runtime.hf_folder import export_hf

        export_hf(run.checkpoints, Path(run.export_hf))
