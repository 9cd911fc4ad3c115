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


def _links(args: argparse.Namespace) -> None:
    from bench import links

    run(links.main(args.rounds))


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


def _ranks(args: argparse.Namespace) -> None:
    from bench import ranks

    setting = ranks.Setting(model=args.model, rounds=args.rounds)
    if args.workloads:
        setting = replace(setting, workloads=tuple(args.workloads.split(",")))
    if args.dtypes:
        setting = replace(setting, dtypes=tuple(args.dtypes.split(",")))
    run(ranks.main(setting))


def _paging(args: argparse.Namespace) -> None:
    from bench import paging

    paging.main(paging.Setting())


def _pressure(args: argparse.Namespace) -> None:
    from bench import pressure

    pressure.main()


def _line(args: argparse.Namespace) -> None:
    from bench import line

    line.main()


def _core_scale(args: argparse.Namespace) -> None:
    from bench import core_scale

    core_scale.main()


def _pipeline(args: argparse.Namespace) -> None:
    from bench import pipeline

    pipeline.main()


def _in_flight(args: argparse.Namespace) -> None:
    from bench import in_flight

    in_flight.main(args.model, args.rounds)


def _chat(args: argparse.Namespace) -> None:
    from bench import chat

    chat.main(chat.Setting(model=args.model, rounds=args.rounds))


def _autoscale(args: argparse.Namespace) -> None:
    from bench import autoscale

    run(autoscale.main((args.workloads or "fake,smollm2").split(",")))


def _placement(args: argparse.Namespace) -> None:
    from bench import placement

    placement.main(placement.Setting())


def _tiers(args: argparse.Namespace) -> None:
    from bench import tiers

    parts = (args.workloads or "links,whole").split(",")
    run(tiers.main(tiers.Setting(model=args.model, rounds=args.rounds), parts))


def _beside(args: argparse.Namespace) -> None:
    from bench import beside

    parts = (args.workloads or "prompt,batch").split(",")
    run(beside.main(beside.Setting(model=args.model, rounds=args.rounds), parts))


def _held(args: argparse.Namespace) -> None:
    from bench import held

    run(held.main(held.Setting(rounds=args.rounds)))


def _single(args: argparse.Namespace) -> None:
    from bench import single

    setting = single.Setting(model=args.model, rounds=args.rounds)
    if args.workloads:
        setting = replace(setting, parts=tuple(args.workloads.split(",")))
    run(single.main(setting))


def _quality(args: argparse.Namespace) -> None:
    from bench import quality

    quality.main(args.model)


def _gemm(args: argparse.Namespace) -> None:
    from bench import gemm

    gemm.main()


def _delay(args: argparse.Namespace) -> None:
    from bench import delay

    setting = delay.Setting(rounds=args.rounds)
    if args.workloads:
        parts = {model: setting.parts[model] for model in args.workloads.split(",")}
        setting = replace(setting, parts=parts)
    delay.main(setting)


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
    "links": _links,
    "peers": _peers,
    "services": _services,
    "stages": _stages,
    "ranks": _ranks,
    "paging": _paging,
    "pressure": _pressure,
    "line": _line,
    "core_scale": _core_scale,
    "pipeline": _pipeline,
    "in_flight": _in_flight,
    "chat": _chat,
    "tiers": _tiers,
    "placement": _placement,
    "autoscale": _autoscale,
    "beside": _beside,
    "held": _held,
    "single": _single,
    "quality": _quality,
    "gemm": _gemm,
    "delay": _delay,
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
    parser.add_argument("--dtypes", help="of the rows peers, ranks and device: bfloat16,float32,...")
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
