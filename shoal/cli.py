"""The `shoal` command: `up`, `generate`, `models`, `model`, `why`, `cache`, `bench`, `demo`.

What runs locally is found through the run folder that `up` writes, so that nothing needs to be said twice;
`--address` and `--nats` reach any other deployment. Exit codes: 0 done, 1 refused or failed, 2 wrong use.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from chassis.errors import BusError
from shoal import bench_words, cache_words, generate_words, model_words
from shoal.client import Accepted, AsyncClient, Client, Params, ShoalError
from shoal.launcher import Deployment, LaunchError, Plan, read_state
from shoal.ledger import Ledger
from shoal.models import ModelError
from shoal.why import render_ledger, why

_TRACE_WAIT_S = 5.0
DEMO_PROMPT = "Why is the sky blue? Answer in two sentences."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.do(arguments)
        return code
    except (ShoalError, LaunchError, ModelError, BusError) as error:
        _say(f"shoal: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# ---- the words -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shoal", description="Serves large language models as a pipeline.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run everything on this machine until Ctrl-C")
    _add_plan(up)
    up.add_argument("--port", type=int, default=50051, help="of the gateway (0: any free one)")
    up.set_defaults(do=_up)

    generate = commands.add_parser("generate", help="stream the answer to a prompt")
    generate_words.add_words(generate)
    _add_where(generate)
    generate.set_defaults(do=_generate)

    models = commands.add_parser("models", help="list the models that are served")
    _add_where(models)
    models.set_defaults(do=_models)

    model = commands.add_parser("model", help="keep models with versions: add, list, check, remove")
    model_words.add_words(model)

    tell = commands.add_parser("why", help="explain where a request's time went")
    tell.add_argument("request_id")
    tell.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")
    _add_run_dir(tell)
    tell.set_defaults(do=_why)

    cache = commands.add_parser("cache", help="show what is cached, by pool and prefix")
    cache_words.add_words(cache)
    _add_run_dir(cache)
    cache.set_defaults(do=_cache)

    bench = commands.add_parser("bench", help="say where a step's time goes, beside what the machine allows")
    bench_words.add_words(bench)

    demo = commands.add_parser("demo", help="start everything, ask one question, explain the answer, stop")
    demo.add_argument("prompt", nargs="?", default=DEMO_PROMPT)
    _add_plan(demo)
    demo.set_defaults(do=_demo, port=0)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="GGUF file, Hugging Face folder, name[:version], smollm2 or fake"
    )
    model_words.add_repository(parser)
    model_words.add_precision(parser)
    parser.add_argument("--stages", type=int, default=2, help="workers that share the model's layers")
    parser.add_argument("--spares", type=int, default=0, help="workers that wait to replace one")
    parser.add_argument("--config", type=Path, help="TOML file with a section per service")
    parser.add_argument("--nats", help="URL of an existing server instead of an own one")
    _add_run_dir(parser)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="host:port of a gateway (default: what `shoal up` runs)")
    _add_run_dir(parser)


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("SHOAL_RUN_DIR", ".shoal"))
    parser.add_argument("--run-dir", type=Path, default=default, help="logs and state (default: .shoal)")


# ---- the commands ----------------------------------------------------------------------------------


def _up(arguments: argparse.Namespace) -> int:
    return asyncio.run(_stay_up(_plan(arguments)))


async def _stay_up(plan: Plan) -> int:
    shoal = Deployment(plan)
    stopped = _on_signals(shoal)
    _say(f"starting {plan.model} in {plan.stages} stages; logs in {shoal.run_dir / 'logs'}")
    try:
        if not await _unless(stopped, shoal.start()) or not await _unless(stopped, shoal.wait_ready()):
            return 0
        _say(f"serving gRPC on {shoal.address}, bus at {shoal.nats_url}; Ctrl-C drains and stops")
        await stopped.wait()
    finally:
        _say("draining")
        for name in await shoal.stop():
            _say(f"{name} did not drain in time")
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    prompt, params = generate_words.prompt_of(arguments), generate_words.params_of(arguments)
    with Client(_address(arguments)) as client:
        events = client.generate(prompt, params)
        generate_words.print_events(events, arguments.ids, several=(params.n or 1) > 1)
    return 0


def _models(arguments: argparse.Namespace) -> int:
    with Client(_address(arguments)) as client:
        for model in client.models():
            chat = "chat" if model.chat else "no chat"
            _print(f"{model.name}  context {model.context_len_max}  vocabulary {model.vocab_size}  {chat}")
    return 0


def _why(arguments: argparse.Namespace) -> int:
    story, text = asyncio.run(why(_nats_url(arguments), arguments.request_id))
    _print(text)
    return 0 if story.records or story.spans else 1


def _cache(arguments: argparse.Namespace) -> int:
    text, whole = asyncio.run(cache_words.show(_nats_url(arguments), arguments))
    _print(text)
    return 0 if whole else 1


def _demo(arguments: argparse.Namespace) -> int:
    return asyncio.run(_show(_plan(arguments), arguments.prompt))


async def _show(plan: Plan, question: str) -> int:
    shoal = Deployment(plan)
    stopped = _on_signals(shoal)
    _say(f"starting NATS, kvstore, {plan.stages} stage workers, batcher and gateway ({plan.model})")
    try:
        if not await _unless(stopped, shoal.start()) or not await _unless(stopped, shoal.wait_ready()):
            return 130
        _say(f"> {question}\n")
        if not await _unless(stopped, _ask(shoal, question)):
            return 130
    finally:
        late = await shoal.stop()
    _say("stopped cleanly" if not late else f"had to be killed: {', '.join(late)}")
    return 1 if late else 0


async def _ask(shoal: Deployment, question: str) -> None:
    request_id = ""
    async with AsyncClient(shoal.address) as client:
        async for event in client.generate([("user", question)], Params(temperature=0.0, max_tokens=128)):
            if isinstance(event, Accepted):
                request_id = event.request_id
            generate_words.print_event(event)
    story, _ = await why(shoal.nats_url, request_id, wait_s=_TRACE_WAIT_S)
    book: Ledger | None = story.ledger()
    _print(render_ledger(book))


# ---- between ---------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> Plan:
    return Plan(
        model=arguments.model,
        repository=arguments.repository,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        int8_activations=arguments.int8_activations,
        stages=arguments.stages,
        spares=arguments.spares,
        run_dir=arguments.run_dir,
        config=arguments.config,
        nats_url=arguments.nats or os.environ.get("SHOAL_NATS_URL"),
        port=arguments.port,
    )


def _address(arguments: argparse.Namespace) -> str:
    if arguments.address:
        return str(arguments.address)
    addresses = read_state(arguments.run_dir)["addresses"]
    assert isinstance(addresses, list)
    return str(addresses[0])


def _nats_url(arguments: argparse.Namespace) -> str:
    url = arguments.nats or os.environ.get("SHOAL_NATS_URL")
    return str(url or read_state(arguments.run_dir)["nats_url"])


def _on_signals(shoal: Deployment) -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM; the second kills what has not drained."""
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            shoal.kill_all()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopped


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` came to its end before somebody said stop."""
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            waiting = group.create_task(stopped.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            working.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # only `work` can fail
    return not working.cancelled()


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _say(text: str) -> None:
    """For people, not for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
