"""A rank that raises, one that hangs, one that is killed: what the others see and how soon."""

import json
import os
import signal
import time

from tiny import batched, sequences, start, tiny

from loadmaster.describe.layout import Layout
from loadmaster.runtime import RankFailure, build
from loadmaster.runtime.loss import CausalLanguageModel, count_labels

rank, size = start()
found = []


class Fault:
    """The usual loss, until rank 1's second micro-batch."""

    def __init__(self, act):
        self.act, self.calls, self.at = act, 0, 0.0

    def __call__(self, module, batch):
        self.calls += 1
        if rank == 1 and self.calls == 4:
            self.at = time.time()
            self.act()
        return CausalLanguageModel()(module, batch)


def fail():
    raise ValueError("a broken sample")


def attempt(layout, act, timeout):
    fault = Fault(act)
    engine = build(tiny(), layout, loss=fault, count=count_labels, timeout=timeout)
    window = batched(sequences(0, 2), 1)
    engine.step(window)
    began = time.time()
    try:
        engine.step(window)
    except RankFailure as failure:
        caught = time.time()
        place = failure.place
        return {
            "rank": failure.rank, "step": place.step, "micro_batch": place.micro_batch, "action": place.action,
            "text": str(failure), "caught": caught, "at": fault.at, "began": began,
        }  # fmt: skip
    return None


for fields in ({"dp_replicate": size}, {"dp_shard": size, "zero": 1}, {"dp_shard": size, "zero": 3}):
    found.append(attempt(Layout(precision="fp32", bucket_bytes=8192, **fields), fail, 60.0))
found.append(attempt(Layout(precision="fp32", dp_shard=size, zero=2), lambda: time.sleep(6.0), 1.0))
if rank == 1:
    print("[]", flush=True)
found.append(
    attempt(Layout(precision="fp32", dp_shard=size, zero=2), lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0)
)


print(json.dumps(found), flush=True)
os._exit(0)
