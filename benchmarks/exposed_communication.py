"""Exposed communication and the best bucket size on a link of limited bandwidth, beside the law.

    sudo python benchmarks/exposed_communication.py --mbit 100 --json

Two ranks in two network namespaces joined by a veth pair whose both ends pass a token-bucket filter: two hosts on one
machine. The link's alpha and bandwidth are fitted on our own all-reduce over it; the moments at which gradients
become ready are taken from a run without communication. From these the law replays the buckets and says how much of
the reduction stays exposed at each bucket size, and which size is best. Needs root, `ip` and `tc`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

SIZES = [1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 24]  # bucket bytes
HOSTS = ("lmhost0", "lmhost1")


def network(mbit):
    """Two namespaces, one limited link."""
    run = lambda *words: subprocess.run(words, check=True)  # noqa: E731
    for host in HOSTS:
        run("ip", "netns", "add", host)
        run("ip", "-n", host, "link", "set", "lo", "up")
    run("ip", "link", "add", "lmlink", "netns", HOSTS[0], "type", "veth", "peer", "name", "lmlink", "netns", HOSTS[1])
    for i, host in enumerate(HOSTS):
        run("ip", "-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "lmlink")
        run("ip", "-n", host, "link", "set", "lmlink", "up")
        run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "lmlink", "root", "tbf", "rate", f"{mbit}mbit",
            "burst", "64kb", "latency", "500ms")  # fmt: skip


def no_network():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False)


class Stack:
    """A small decoder of torch's own layers; built where torch is imported."""

    def __new__(cls, width, layers, vocab):
        from torch import nn

        class Decoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(vocab, width)
                self.blocks = nn.ModuleList(
                    nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
                    for _ in range(layers)
                )
                self.head = nn.Linear(width, vocab, bias=False)

            def forward(self, input_ids):
                x = self.embed(input_ids)
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        return Decoder()


def rank_main(args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, args.vocab, (args.batch, args.seq), generator=generator)
    window = [{"input_ids": ids, "labels": ids.clone()}]

    def module():
        torch.manual_seed(0)
        return Stack(args.width, args.layers, args.vocab)

    tier = fit_link(args)
    rows = [measure(module(), window, size, args, tier) for size in SIZES]
    best = law_of_best(rows, tier)
    if rank == 0:
        print(json.dumps({"tier": tier, "rows": rows, "best": best}))
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def fit_link(args):
    """alpha and bandwidth from streams of small and of large all-reduces of ours."""
    import torch

    from loadmaster.describe.layout import Layout
    from loadmaster.program.ring import Algorithm
    from loadmaster.runtime.mesh import data_mesh
    from loadmaster.runtime.ring import PointToPoint
    from loadmaster.runtime.traffic import TrafficMeter

    axis = data_mesh(Layout(dp_replicate=2)).replicate
    ours = PointToPoint(axis, Algorithm.DIRECT, TrafficMeter(), piece_bytes=1 << 30)

    def seconds(size, times):
        """Of one all-reduce in a stream of them, as buckets follow one another; the first two fill the filter."""
        buffer = torch.zeros(size // 4)
        for i in range(times + 2):
            if i == 2:
                start = time.perf_counter()
            ours.all_reduce(buffer)
        return (time.perf_counter() - start) / times

    small, large = 1 << 17, 1 << 22
    quick, slow = (
        statistics.median(seconds(size, times) for _ in range(3)) for size, times in ((small, 24), (large, 2))
    )
    bandwidth = (large - small) / (slow - quick)
    return {"alpha": max(quick - small / bandwidth, 0.0), "bandwidth": bandwidth}


def measure(net, window, size, args, tier):
    """Steps of one bucket size: what stays exposed in each, beside the law for the moments its gradients were ready."""
    from loadmaster.describe.layout import Layout
    from loadmaster.runtime import build

    clock, moments = {"start": 0.0}, {}

    def noter(name):
        return lambda param: moments.__setitem__(name, time.perf_counter() - clock["start"])

    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(noter(name))
    engine = build(net, Layout(dp_replicate=2, precision="fp32", bucket_bytes=size))
    reducer = engine.assembly.reducer
    begin, wait = reducer.begin_backward, reducer.wait

    def marked_begin(**how):
        clock["start"] = time.perf_counter()
        begin(**how)

    def marked_wait():
        clock["end"] = time.perf_counter() - clock["start"]
        wait()

    reducer.begin_backward, reducer.wait = marked_begin, marked_wait
    steps = []
    for _ in range(args.rounds + 1):
        seconds = engine.step(window).seconds
        buckets = [reducer.buckets[b].table for b in reducer.sequence]
        steps.append({
            "exposed": seconds["communication/dp_replicate"], "step": seconds.total, "backward": clock["end"],
            "law": replay(moments, clock["end"], buckets, tier),
        })  # fmt: skip
    engine.close()
    typical = {key: statistics.median(step[key] for step in steps[1:]) for key in steps[0]}
    return {
        "bucket_bytes": size,
        "buckets": len(reducer.buckets),
        "gradient_bytes": 4 * sum(b.table.numel for b in reducer.buckets),
        **typical,
    }


def replay(moments, end, buckets, tier):
    """The law: when each bucket is full, how long its all-reduce takes, and what is left at the end."""
    from loadmaster.laws.collectives import Tier, collective_seconds
    from loadmaster.laws.overlap import replay_buckets

    link = Tier(alpha=tier["alpha"], bandwidth=tier["bandwidth"])
    full, fills = 0.0, []
    for bucket in buckets:
        ready = max(full, max(moments[entry.name] for entry in bucket.entries))
        fills.append(ready - full)
        full = ready
    costs = [float(collective_seconds("all_reduce", 4 * bucket.numel, 2, link)) for bucket in buckets]
    return max(replay_buckets(fills, costs).exposed - max(end - full, 0.0), 0.0)


def law_of_best(rows, tier):
    from loadmaster.laws.collectives import Tier, best_bucket

    link = Tier(alpha=tier["alpha"], bandwidth=tier["bandwidth"])
    backward = statistics.median(row["backward"] for row in rows)
    size, cost = best_bucket(rows[0]["gradient_bytes"], 2, link, backward, slowdown=0.0)
    return {"bucket_bytes": size, "exposed": cost, "backward": backward}


def launch(args):
    command = [sys.executable, __file__, "--rank-main"]
    for name in ("width", "layers", "vocab", "batch", "seq", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    started = []
    for rank, host in enumerate(HOSTS):
        env = {**os.environ, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555", "WORLD_SIZE": "2", "RANK": str(rank),
               "GLOO_SOCKET_IFNAME": "lmlink", "OMP_NUM_THREADS": "1"}  # fmt: skip
        started.append(
            subprocess.Popen(["ip", "netns", "exec", host, *command], env=env, stdout=subprocess.PIPE, text=True)
        )
    outputs = [p.communicate()[0] for p in started]
    return json.loads(outputs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-main", action="store_true")
    for name, value in {"width": 256, "layers": 6, "vocab": 2048, "batch": 8, "seq": 256, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.rank_main:
        return rank_main(args)
    no_network()
    try:
        network(args.mbit)
        found = launch(args)
    finally:
        no_network()
    if args.json:
        print(json.dumps(found))
        return None
    tier = found["tier"]
    print(f"link: alpha {tier['alpha'] * 1e3:.2f} ms, {tier['bandwidth'] / 1e6:.2f} MB/s")
    print("bucket KiB  buckets  backward s  exposed s  law s  law/measured  exposed+backward s")
    for row in found["rows"]:
        print(
            f"{row['bucket_bytes'] >> 10:10}  {row['buckets']:7}  {row['backward']:10.3f}  {row['exposed']:9.3f}"
            f"  {row['law']:5.3f}  {row['law'] / row['exposed']:12.3f}  {row['exposed'] + row['backward']:18.3f}"
        )
    least = min(found["rows"], key=lambda row: row["exposed"])
    print(f"least exposed at {least['bucket_bytes'] >> 10} KiB; by law {found['best']['bucket_bytes'] >> 10} KiB")
    return None


if __name__ == "__main__":
    main()
