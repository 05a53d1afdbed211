"""Everything a run is, in one value that travels to every rank as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.require import real, whole
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.runtime.schedules import LearningRate

__all__ = ["Run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to train, on what, for how long, and where it is written.

    Attributes:
        config, factory: the model: a Hugging Face config or ``package.module:function``.
        layout, workload: as planned.
        data, tokenizer, text_field: text (`find_documents`) and how it becomes ids.
        out: folder of metrics, checkpoints, logs and ledgers.
        steps, lr, warmup, final_lr, schedule: of the learning rate.
        weight_decay: on matrices only; betas, eps, clip: of AdamW and the gradient norm (0: no clipping).
        seed: of weights, order of data, and dropout.
        eval_every, eval_sequences: steps between evaluations on held-out text (0: none), and how much of it.
        save_every, keep, asynchronous: steps between checkpoints (0: at the end alone), how many stay, in background.
        resume: ``no``, ``yes`` (there must be one), ``auto`` (where there is one); resume_from: a folder.
        peak_flops: dense peak of a device in the compute dtype, None: not known; then no MFU is shown.
        flops_per_step: model FLOPs of all ranks, 0 where no law counts the model.
        tensorboard: write its event files too. quiet: nothing on the terminal.
        export_hf: folder for the trained model in Hugging Face form, or none.
    """

    config: Mapping[str, Any] | None = None
    factory: str | None = None
    layout: Layout
    workload: Workload
    data: str
    out: str
    tokenizer: str = "bytes"
    text_field: str = "text"
    steps: int = 100
    lr: float = 3e-4
    warmup: int = 10
    final_lr: float = 0.1
    schedule: str = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 0
    eval_sequences: int = 64
    save_every: int = 0
    keep: int = 2
    asynchronous: bool = False
    resume: str = "no"
    resume_from: str | None = None
    device: str = "auto"
    peak_flops: float | None = None
    flops_per_step: float = 0.0
    tensorboard: bool = True
    quiet: bool = False
    export_hf: str | None = None
    name: str = field(default="model")

    def __post_init__(self) -> None:
        for name in ("eval_every", "save_every", "seed"):
            whole(name, getattr(self, name), least=0)
        for name in ("weight_decay", "clip"):
            real(name, getattr(self, name))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidInput("betas", self.betas, "must be in [0, 1)", "use e.g. 0.9 and 0.95")
        if self.keep < 1:
            raise InvalidInput("keep", self.keep, "must be at least 1", "one checkpoint always stays")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidInput("device", self.device, "is not known", "use cpu, cuda or auto")
        if self.workload.optimizer == "lion":
            raise InvalidInput("workload.optimizer", "lion", "is priced but not built in", "use adamw, adam or sgd")
        self.learning_rate()

    def learning_rate(self) -> LearningRate:
        """Of this run."""
        return LearningRate(
            peak=self.lr, steps=self.steps, warmup=min(self.warmup, self.steps), final=self.final_lr,
            shape=self.schedule,
        )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.out)

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.folder / "checkpoints"

    def to_json(self) -> dict[str, Any]:
        """For `from_json` on another rank."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "layout": self.layout.to_dict(), "workload": dataclasses.asdict(self.workload)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Run:
        """The run that `to_json` wrote."""
        fields = dict(body)
        fields.update(
            layout=Layout(**body["layout"]), workload=Workload(**body["workload"]), betas=tuple(body["betas"])
        )
        return cls(**fields)
