"""Step time and memory of the data-parallel engine beside torch's DDP and fully_shard, in one run.

    python benchmarks/data_parallel.py --ranks 2 4 --json

Starts its own Gloo ranks. Both sides run the same model, data, AdamW (fused) and clipping. Rounds alternate between
the two, and the figure is the median of the paired ratios, ours / theirs: of wall time, and of processor time, which
other programs on the machine disturb less. Memory is each process's peak resident set
over its own run, from fresh processes, less the resident set before the model exists.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

CASES = {  # name -> (ours: zero stage, theirs)
    "stage0": (0, "ddp"), "stage1": (1, "fully_shard_grad_op"), "stage2": (2, "fully_shard_grad_op"),
    "stage3": (3, "fully_shard"),
}  # fmt: skip


def model(width, layers, vocab):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=vocab,
        max_position_embeddings=2048, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def ours(module, stage, size, window, args):
    from loadmaster.describe.layout import Layout
    from loadmaster.runtime import OptimizerConfig, build

    layout = (
        Layout(dp_shard=size, zero=stage, precision="fp32") if stage else Layout(dp_replicate=size, precision="fp32")
    )
    engine = build(module, layout, optimizer=OptimizerConfig(lr=1e-4, max_grad_norm=1.0))
    return lambda: engine.step(window).loss


def theirs(module, kind, size, window, args):
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from loadmaster.runtime.loss import CausalLanguageModel

    loss = CausalLanguageModel()
    if kind == "ddp":
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for block in module.model.layers:
            fully_shard(block, reshard_after_forward=kind == "fully_shard")
        wrapped = fully_shard(module, reshard_after_forward=kind == "fully_shard")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step():
        total = 0.0
        for i, batch in enumerate(window):
            last = i == len(window) - 1
            if kind == "ddp":
                wrapped.require_backward_grad_sync = last
            elif args.case == "stage1":  # stages 2 and 3 keep gradients sharded between micro-batches
                wrapped.set_requires_gradient_sync(last)
            value, count = loss(wrapped, batch)
            (value / count / len(window)).backward()
            total += value.item() / count.item() / len(window)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def resident():
    with open("/proc/self/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return {k: int(fields[k].split()[0]) * 1024 for k in ("VmRSS", "VmHWM")}


def rank_main(args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    window = []
    for _ in range(args.accumulation):
        ids = torch.randint(0, args.vocab, (args.batch, args.seq), generator=generator)
        window.append({"input_ids": ids, "labels": ids.clone()})
    stage, other = CASES[args.case]
    before = resident()["VmRSS"]
    if args.side == "both":
        sides = {
            "ours": ours(model(args.width, args.layers, args.vocab), stage, size, window, args),
            "theirs": theirs(model(args.width, args.layers, args.vocab), other, size, window, args),
        }
    else:
        make = {
            "ours": lambda m: ours(m, stage, size, window, args),
            "theirs": lambda m: theirs(m, other, size, window, args),
        }
        sides = {args.side: make[args.side](model(args.width, args.layers, args.vocab))}
    seconds = {name: [] for name in sides}
    processor = {name: [] for name in sides}
    losses = {name: [] for name in sides}
    for i in range(args.warmup + args.rounds):
        for name in list(sides) if i % 2 else list(sides)[::-1]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name].append(sides[name]())
            dist.barrier()
            if i >= args.warmup:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
    if "theirs" in losses:  # theirs is each rank's own, ours the mean of all
        mean = torch.tensor(losses["theirs"])
        dist.all_reduce(mean)
        losses["theirs"] = (mean / size).tolist()
    if rank == 0:
        print(
            json.dumps(
                {"seconds": seconds, "processor": processor, "losses": losses, "resident": resident()["VmHWM"] - before}
            ),
            flush=True,
        )
    dist.barrier()
    os._exit(0)


def launch(args, ranks, case, side):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, "--rank-main", "--case", case, "--side", side]
    for name in ("width", "layers", "vocab", "batch", "seq", "accumulation", "warmup", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    started = [
        subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(ranks)
    ]
    outs = [p.communicate()[0] for p in started]
    return json.loads(outs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-main", action="store_true")
    parser.add_argument("--case", default="stage0")
    parser.add_argument("--side", default="both")
    for name, value in {"width": 512, "layers": 8, "vocab": 8192, "batch": 2, "seq": 128, "accumulation": 1,
                        "warmup": 2, "rounds": 8}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.rank_main:
        return rank_main(args)
    rows = []
    for ranks in args.ranks:
        for case in args.cases:
            both = launch(args, ranks, case, "both")
            pairs = list(zip(both["seconds"]["ours"], both["seconds"]["theirs"], strict=True))
            row = {
                "ranks": ranks, "case": case, "theirs": CASES[case][1],
                "ratio": statistics.median(a / b for a, b in pairs),
                "processor_ratio": statistics.median(
                    a / b for a, b in zip(both["processor"]["ours"], both["processor"]["theirs"], strict=True)
                ),
                "ours_seconds": statistics.median(a for a, _ in pairs),
                "theirs_seconds": statistics.median(b for _, b in pairs),
                "loss_difference": abs(both["losses"]["ours"][0] - both["losses"]["theirs"][0]),
            }  # fmt: skip
            if not args.no_memory:
                for side in ("ours", "theirs"):
                    row[f"{side}_peak_bytes"] = launch(args, ranks, case, side)["resident"]
            rows.append(row)
            if not args.json:
                print(
                    " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
                )
    if args.json:
        print(json.dumps({"model": {"width": args.width, "layers": args.layers, "vocab": args.vocab}, "rows": rows}))
    return None


if __name__ == "__main__":
    main()
