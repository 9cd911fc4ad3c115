"""`python -m tests.sim --seeds 50` runs seeds 0 to 49; `--seed 7` runs one and prints its history."""

import argparse
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from multiprocessing import Pool

from tests.sim.bugs import BUGS, injected
from tests.sim.run import Report, run_seed

PROGRESS_SEEDS = 200
SEED_TIME_MAX_S = 20  # of computing: a loop that goes round without time passing


def _stuck(*_: object) -> None:
    raise TimeoutError(f"still running after {SEED_TIME_MAX_S} s")


def _run(seed: int) -> Report:
    signal.signal(signal.SIGVTALRM, _stuck)  # counts what this process computes
    signal.setitimer(signal.ITIMER_VIRTUAL, SEED_TIME_MAX_S)
    try:
        return run_seed(seed)
    except BaseException as error:  # a crash of the simulation itself is a finding too
        if isinstance(error, KeyboardInterrupt):
            raise
        return Report(seed, (f"simulation crashed: {error!r}",), (), (), 0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _reports(seeds: range, jobs: int) -> Iterable[Report]:
    if jobs == 1:
        yield from map(_run, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, seeds, chunksize=4)


def repeat_command(seed: int, bug: str | None = None) -> str:
    return f"python -m tests.sim --seed {seed}" + (f" --bug {bug}" if bug else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bug", choices=BUGS, help="with this deliberate bug in the production code")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    args = parser.parse_args(argv)
    with injected(args.bug) if args.bug else nullcontext():
        return _one(args.seed) if args.seed is not None else _many(args)


def _one(seed: int) -> int:
    report = _run(seed)
    lines = [*report.history, *(f"FAILED {failure}" for failure in report.failures)]
    sys.stdout.write("\n".join(lines) + f"\n{report.virtual_s:.1f} virtual s in {report.real_s:.2f} s\n")
    return 1 if report.failures else 0


def _many(args: argparse.Namespace) -> int:
    out = sys.stdout.write
    start, run, failed = time.perf_counter(), 0, 0
    for report in _reports(range(args.first, args.first + args.seeds), args.jobs):
        run += 1
        if report.failures:
            failed += 1
            out(f"seed {report.seed}: {report.failures[0]}\n")
            out(f"  repeat: {repeat_command(report.seed, args.bug)}\n")
            sys.stdout.flush()
            if not args.keep_going:
                break
        if run % PROGRESS_SEEDS == 0:
            out(f"{run} seeds, {failed} failed so far\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - start
    out(f"{run} seeds, {failed} failed, {seconds / max(run, 1) * args.jobs:.3f} s a seed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
