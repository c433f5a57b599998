"""`python -m bench`: measure ops on this GPU against the peers and the physical limit."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import plots, records, results_page
from bench.case import Case, Op, all_ops, select
from bench.shapes import PUBLISHED, SHAPES, Shapes, shapes_named

EPILOG = """examples:
  python -m bench --list                              what can be measured, with bytes and FLOPs (no GPU needed)
  python -m bench rms_norm                            one op at the default sizes
  python -m bench fused --shapes llama3-8b            a family at the sizes of a model
  python -m bench act_mul --against torch,vllm        only these baselines
  python -m bench --all                               every op at the published sizes: records, plots, docs/results.md
  python -m bench --check-records                     which records belong to an older kernel (exit status 1 if any)

Time per call: median over 7 rounds, each a few milliseconds of CUDA-graph replays over rotating inputs, all contenders
interleaved. Vendor kernels are loaded from peers/ at the repository root when it holds vLLM's libraries (see bench/peers.py);
without them their column says "not installed". Results go to bench/results/<family>.jsonl and docs/results.md.
Exit status: 0 measured, 1 something of ours failed or records are out of date, 2 wrong arguments or no GPU.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("names", nargs="*", metavar="FAMILY|OP", help="families (folders of bench/), ops or family/op; none: all")
    p.add_argument("--shapes", default="default", metavar="NAME[,NAME]", help=f"size tables: {', '.join(SHAPES)} (default: default)")
    p.add_argument("--against", metavar="NAME[,NAME]", help="only these baselines; the others are recorded as not asked for")
    p.add_argument("--all", action="store_true", help=f"the size tables of the published records ({', '.join(PUBLISHED)}), and plots")
    p.add_argument("--quick", action="store_true", help="3 short rounds; prints alone, writes no record")
    p.add_argument("--plot", action="store_true", help="draw docs/img/roofline.svg and speedup.svg from the records")
    p.add_argument("--list", action="store_true", help="list families, ops and cases, and stop")
    p.add_argument("--check-records", action="store_true", help="list records whose kernels changed since, and stop")
    p.add_argument(
        "--results-only", action="store_true", help="write docs/results.md (and plots, with --plot) from the records, measure nothing"
    )
    return p


Work = list[tuple[Op, Shapes, Case]]


def plan(ops: list[Op], tables: list[Shapes]) -> Work:
    return [(op, shapes, case) for op in ops for shapes in tables for case in op.cases(shapes)]


def print_list(work: Work, console: Console) -> None:
    for op in dict.fromkeys(op for op, _, _ in work):
        console.print(f"[bold]{op.stem}[/bold]")
        for _, shapes, case in (w for w in work if w[0] == op):
            flops = f", {case.flops / 1e6:,.2f} MFLOP" if case.flops else ""
            baselines = ", ".join(case.baselines) or "none"
            console.print(f"  {shapes.name}: {case.name}  ({case.bytes / 1e6:,.3f} MB{flops}; against {baselines})", highlight=False)


def check_records(console: Console) -> int:
    everything = records.read()
    found = records.stale(everything)
    for record, reason in found:
        console.print(f"{record['op']} {record['shape']}: {record['case']}: {reason}", highlight=False)
    total = len(everything)
    console.print(
        f"{len(found)} of {total} records are of another version of their kernel" if found else f"all {total} records are current"
    )
    return 1 if found else 0


def write_pages(console: Console, draw: bool) -> None:
    everything = records.read()
    written = [results_page.write(everything), *(plots.draw(everything) if draw else [])]
    console.print("wrote " + ", ".join(str(path.relative_to(records.ROOT)) for path in written), highlight=False)


def measure(work: Work, args: argparse.Namespace, command: str, console: Console) -> int:
    """Measure, print, record."""
    import torch

    from bench import ceilings, machine, peers, report
    from bench.runner import Settings
    from bench.runner import measure as measure_case

    settings = Settings(tuple(args.against.split(",")) if args.against else None, args.quick)
    monitor = machine.Monitor(torch.cuda.current_device())
    about = machine.describe(monitor, command)
    console.print(f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, commit {about['commit']}", highlight=False)
    for note in [monitor.reason, *(f"{library}: {reason}" for library, reason in peers.status().items() if reason)]:
        if note:
            console.print(note, style="yellow", highlight=False)
    found = ceilings.measure()
    console.print(report.ceilings_line(found), highlight=False)
    done, failed = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for op, shapes, case in work:
            progress.update(task, description=f"{op.name} {shapes.name}: {case.name}")
            try:
                done.append(measure_case(op, shapes, case, settings, found, monitor, about))
            except Exception:  # one op that fails must not take the other ops' numbers with it; the exit status tells
                failed.append(f"{op.stem} {shapes.name}: {case.name}\n{traceback.format_exc(limit=-3)}")
            else:
                if not args.quick:
                    records.write(done[-1:])  # at once, so that a run that is cut short keeps what it measured
                if not console.is_terminal:
                    console.print(f"{op.name} {shapes.name}: {case.name}: {report.time_text(done[-1])} µs", highlight=False)
            progress.advance(task)
    console.print(report.table(done))
    for text in failed:
        console.print(f"FAILED {text}", style="red", highlight=False, markup=False)
    if not args.quick and done:
        write_pages(console, args.plot or args.all)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    # Redirected output has no width of its own, and 80 columns would cut the tables.
    console = Console() if sys.stdout.isatty() else Console(width=220)
    try:
        alone = [flag for flag in ("list", "check_records", "results_only") if getattr(args, flag)]
        measuring = [flag for flag in ("all", "quick", "against") if getattr(args, flag)] + ["names"] * bool(args.names)
        extra = [f for f in measuring if not (alone == ["list"] and f in ("names", "all"))]
        if len(alone) > 1 or (alone and extra):
            clash = ", ".join(f.replace("_", "-") for f in alone + extra)
            raise ValueError(f"{clash}: --{alone[0].replace('_', '-')} stands alone, it measures nothing")
        if args.plot and args.quick:
            raise ValueError("--plot draws records, and --quick writes none")
        if args.check_records:
            return check_records(console)
        if args.results_only:
            write_pages(console, args.plot)
            return 0
        tables = [shapes_named(name) for name in (PUBLISHED if args.all else args.shapes.split(","))]
        work = plan(select(args.names, all_ops()), tables)
        known = {name for _, _, case in work for name in case.baselines}
        unknown = sorted(set(args.against.split(",") if args.against else ()) - known)
        if unknown:
            raise ValueError(f"bench: --against names {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    if args.list:
        print_list(work, console)
        return 0
    import torch

    if not torch.cuda.is_available():
        console.print("bench: no CUDA GPU here; --list, --check-records and --results-only work without one", style="red", highlight=False)
        return 2
    return measure(work, args, " ".join(["python -m bench", *map(shlex.quote, argv)]), console)


if __name__ == "__main__":
    sys.exit(main())
