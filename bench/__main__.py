"""`python -m bench ROW...`: measures rows and appends them to `bench/results/`. Without a row: all."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from bench.client_loop import run


def _tax(args: argparse.Namespace) -> None:
    from bench import tax

    setting = tax.Setting(
        model=args.model,
        stages=args.stages,
        rounds=args.rounds,
        workloads=tuple((args.workloads or "W1,W2,W3,W4").split(",")),
    )
    run(tax.main(setting))


def _stalls(args: argparse.Namespace) -> None:
    from bench import stalls

    run(stalls.main(args.model, args.stages))


def _streams(args: argparse.Namespace) -> None:
    from bench import streams

    run(streams.main(args.rounds))


def _sim(args: argparse.Namespace) -> None:
    from bench import simulation

    simulation.main()


def _cores(args: argparse.Namespace) -> None:
    from bench import cores

    cores.main()


def _floor(args: argparse.Namespace) -> None:
    from bench import floor

    floor.main()


def _peers(args: argparse.Namespace) -> None:
    from bench.peers import match

    setting = match.Setting(rounds=args.rounds, quiet_wait_s=args.quiet_wait)
    if args.workloads:
        setting = replace(setting, workloads=tuple(args.workloads.split(",")))
    if args.dtypes:
        setting = replace(setting, rows=tuple(args.dtypes.split(",")))
    if args.contestants:
        setting = replace(setting, contestants=tuple(args.contestants.split(",")))
    match.main(setting)


def _services(args: argparse.Namespace) -> None:
    from bench import services

    setting = services.Setting(rounds=args.rounds)
    if args.workloads:
        setting = replace(setting, workloads=tuple(args.workloads.split(",")))
    run(services.main(setting))


def _stages(args: argparse.Namespace) -> None:
    from bench import stages

    stages.main(args.rounds)


def _paging(args: argparse.Namespace) -> None:
    from bench import paging

    paging.main(paging.Setting())


def _chat(args: argparse.Namespace) -> None:
    from bench import chat

    chat.main(chat.Setting(model=args.model, rounds=args.rounds))


def _quality(args: argparse.Namespace) -> None:
    from bench import quality

    quality.main(args.model)


def _gemm(args: argparse.Namespace) -> None:
    from bench import gemm

    gemm.main()


def _device(args: argparse.Namespace) -> None:
    from bench import device

    setting = device.Setting(device=args.device, model=args.model, stages=1, rounds=args.rounds)
    if args.workloads:
        setting = replace(setting, workloads=tuple(args.workloads.split(",")))
    if args.dtypes:
        setting = replace(setting, dtypes=tuple(args.dtypes.split(",")))
    if device.main(setting) and "device" in args.rows:
        sys.exit(1)


ROWS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tax": _tax,
    "stalls": _stalls,
    "streams": _streams,
    "sim": _sim,
    "cores": _cores,
    "floor": _floor,
    "peers": _peers,
    "services": _services,
    "stages": _stages,
    "paging": _paging,
    "chat": _chat,
    "quality": _quality,
    "gemm": _gemm,
    "device": _device,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], help="default: all")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--device", default="cuda", help="of the row device: cuda, cuda:N; cpu to try it out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", help="W1,W2,...; default: all of a row")
    parser.add_argument("--dtypes", help="of the rows peers and device: bfloat16,float32,...")
    parser.add_argument(
        "--contestants", help="of the row peers: shoal,vllm,...; the first is held against all"
    )
    parser.add_argument("--quiet-wait", type=float, default=60.0, help="of the row peers: seconds")
    args = parser.parse_args()
    for row in args.rows or ROWS:
        sys.stdout.write(f"== {row}\n")
        ROWS[row](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
