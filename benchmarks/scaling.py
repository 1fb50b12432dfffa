"""How cost grows with clients: a round of 10, 50 and 100 clients, and federations of 100 and 1,000.

    python benchmarks/scaling.py [--device cuda] [--precision bf16] [--algorithm feddc] [--full]

The paper's CIFAR CNN and 500 random images a client. Seconds of a round (median of three, without evaluation), and the
device's memory that all clients' rows and a client's part in a stacked step take. --full first fills the GPU's memory,
so that the clients' rows do not fit and live in the host's.
"""

import argparse
import statistics
import time

import torch

from fedman.algorithms import ALGORITHMS
from fedman.execution.device import matmul_precision
from rounds import Rounds

GIB = 2**30


def seconds_of_a_round(rounds: Rounds, cohort: int) -> float:
    """The median of three, after one to warm up."""
    times, clients = [], len(rounds.federation.ids)
    for i in range(4):
        started = time.perf_counter()
        rounds.play(sorted((k + i) % clients for k in range(cohort)))
        if rounds.federation.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--algorithm", default="feddc", choices=ALGORITHMS)
    parser.add_argument("--cases", nargs="+", default=["100:10", "100:50", "100:100", "1000:10", "1000:100"])
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    ballast: list[torch.Tensor] = []
    print(f"{options.algorithm}, {options.precision}, {torch.cuda.get_device_name() if cuda else 'cpu'}")
    print(f"{'clients':>8}{'a round':>9}{'s a round':>11}{'ms a client':>13}{'rows on':>11}{'GiB':>6}{'peak GiB':>10}")
    for case in options.cases:
        clients, cohort = map(int, case.split(":"))
        rounds = Rounds(clients, options.algorithm, options.device, options.precision)
        federation = rounds.federation
        tables = clients * len(federation.initial) * 4 * (1 + len(federation.algorithm.client))
        if options.full and cuda:
            torch.cuda.empty_cache()
            room = int(tables * 1.3)
            ballast = [torch.empty(max(0, torch.cuda.mem_get_info()[0] - room), dtype=torch.uint8, device=device)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with matmul_precision(options.precision):
            rounds.state = federation.start()
            held = sum(b.nbytes for b in ballast)
            ballast.clear()
            seconds = seconds_of_a_round(rounds, cohort)
        peak = (torch.cuda.max_memory_allocated() - held) / GIB if cuda else float("nan")
        home = next(level.device.type for level in rounds.state.clients.levels if level.slots)
        row = f"{seconds:11.4f}{1e3 * seconds / cohort:13.2f}{home:>12}{tables / GIB:13.2f}{peak:10.2f}"
        print(f"{clients:8}{cohort:9}{row}", flush=True)
        del rounds, federation


if __name__ == "__main__":
    main()
