"""What ncu counts in one launch of a bench case, ours beside a peer's: where a shortfall comes from. Needs ncu and leave to use counters.

    python -m tools.profile_case prefill_attention "n=16384 H=16 K=4 D=256 full" --against fa3

One call of each warms up, one is counted, at the clocks that the GPU chooses (about ten seconds). A call of several kernels shows each.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.case import Case, PeerMissing, all_ops, select
from bench.shapes import shapes_named

METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__cycles_elapsed.max": "clocks",
    "smsp__inst_executed.avg.pct_of_peak_sustained_active": "issue slots used",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU pipe",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "FMA pipe",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exponential pipe",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "warps waiting for wgmma, an issue",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_active": "shared memory, reads",
    "l1tex__data_bank_writes.avg.pct_of_peak_sustained_active": "shared memory, writes",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank conflicts of loads and stores",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "L2",
    "lts__t_sectors_op_read.sum": "sectors read from L2",
    "dram__bytes_read.sum": "read from memory",
}
"""ncu's name -> ours. How busy the tensor cores are no counter says for wgmma: FLOPs over clocks times 4096 a clock and SM in bf16."""


def find_case(op: str, name: str, shapes: str) -> Case:
    """The one case of `op` with `name` in its name."""
    found = [case for one in select([op], all_ops()) for case in one.cases(shapes_named(shapes)) if name in case.name]
    if len(found) != 1:
        names = ", ".join(repr(case.name) for case in found) or "none"
        raise SystemExit(f"profile_case: case {name!r} of {op} at shapes {shapes} is in {len(found)} names, expected 1: {names}")
    return found[0]


def run_once(case: Case, against: Sequence[str]) -> None:
    """What ncu watches: it counts between the profiler's start and stop alone."""
    import torch

    inputs = case.make(1)[0]
    calls = [case.ours, *(case.baselines[name] for name in against)]
    for call in calls:
        call(inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call(inputs)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def table(report: str) -> str:
    """ncu's csv, a kernel a column."""
    lines = report.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"profile_case: ncu counted nothing:\n{report}")
    kernels: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        names[row["ID"]] = row["Kernel Name"]
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    rows = [f"kernel {number}: {name[:120]}" for number, name in names.items()]
    rows.append(f"{'':38}" + "".join(f"{number:>22}" for number in kernels))
    rows += [f"{ours:38}" + "".join(f"{found.get(metric, '-'):>22}" for found in kernels.values()) for metric, ours in METRICS.items()]
    return "\n".join(rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.profile_case", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("op")
    parser.add_argument("case", help="a part of its name that no other case of the op has (python -m bench --list)")
    parser.add_argument("--shapes", default="default")
    parser.add_argument("--against", default="", metavar="NAME[,NAME]", help="baselines to count as well")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    case, against = find_case(args.op, args.case, args.shapes), [name for name in args.against.split(",") if name]
    if unknown := sorted(set(against) - set(case.baselines)):
        raise SystemExit(f"profile_case: against {', '.join(unknown)}, expected some of {', '.join(case.baselines) or 'none'}")
    if args.counted:
        try:
            run_once(case, against)
        except PeerMissing as missing:
            raise SystemExit(f"profile_case: {missing}") from missing
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("profile_case: ncu is not on the path")
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS)]
    again = [sys.executable, "-m", "tools.profile_case", *(sys.argv[1:] if argv is None else argv), "--counted"]
    done = subprocess.run([ncu, *options, *again], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        return done.returncode
    print(f"{case.name}: ours" + "".join(f", {name}" for name in against))
    print(table(done.stdout))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
