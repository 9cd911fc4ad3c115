"""The `shoal` command: `up`, `generate`, `models`, `model`, `why`, `demo`.

What runs locally is found through the run folder that `up` writes, so that nothing needs to be said twice;
`--address` and `--nats` reach any other deployment. Exit codes: 0 done, 1 refused or failed, 2 wrong use.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from chassis.errors import BusError
from shoal import model_words
from shoal.client import Accepted, AsyncClient, Client, Delta, Event, Finished, Params, Prompt, ShoalError
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
    generate.add_argument("prompt", help="text, or - to read it from standard input")
    _add_params(generate)
    _add_where(generate)
    generate.add_argument("--ids", action="store_true", help="print output ids instead of text")
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


def _add_params(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat", action="store_true", help="as a user's turn, in the model's chat template")
    parser.add_argument("--system", default="", help="a system turn before it (with --chat)")
    parser.add_argument("--model", default="", help="which one, when several are served")
    parser.add_argument("--temperature", type=float, help="0 = greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--stop", action="append", default=[], help="may be given several times")
    parser.add_argument("--priority", type=int, help="0 (first) to 9")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS")


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
    text = arguments.prompt
    if text == "-":  # what is no UTF-8 is refused where every other value is
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    prompt: Prompt = text
    if arguments.chat:
        system = [("system", arguments.system)] if arguments.system else []
        prompt = [*system, ("user", text)]
    params = Params(
        model=arguments.model,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        priority=arguments.priority,
        timeout_ms=round(arguments.timeout * 1000),
    )
    with Client(_address(arguments)) as client:
        _print_events(client.generate(prompt, params), arguments.ids)
    return 0


def _models(arguments: argparse.Namespace) -> int:
    with Client(_address(arguments)) as client:
        for model in client.models():
            chat = "chat" if model.chat else "no chat"
            _print(f"{model.name}  context {model.context_len_max}  vocabulary {model.vocab_size}  {chat}")
    return 0


def _why(arguments: argparse.Namespace) -> int:
    url = arguments.nats or os.environ.get("SHOAL_NATS_URL")
    if not url:
        url = str(read_state(arguments.run_dir)["nats_url"])
    story, text = asyncio.run(why(url, arguments.request_id))
    _print(text)
    return 0 if story.records or story.spans else 1


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
            _print_event(event, ids=False)
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


def _print_events(events: Iterable[Event], ids: bool) -> None:
    for event in events:
        _print_event(event, ids)


def _print_event(event: Event, ids: bool) -> None:
    match event:
        case Accepted(request_id):
            _say(f"request {request_id}")
        case Delta() as delta:
            text = "".join(f"{i} " for i in delta.ids) if ids else delta.text
            _print(text, end="")
        case Finished() as end:
            rate = end.output_tokens / (end.decode_us / 1e6) if end.decode_us else 0.0
            _print("")
            _say(
                f"{end.reason}: {end.output_tokens} tokens ({rate:.1f}/s) after {end.prompt_tokens}"
                f" of prompt, {end.cached_tokens} of them cached"
            )


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _say(text: str) -> None:
    """For people, not for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
