"""The `shoal` command: `up`, `join`, `serve`, `scale`, `generate`, `resume`, `chat`, `models`, `model`,
`init`, `keys`, `why`, `cache`, `stats`, `usage`, `batch`, `bench`, `demo`.

What runs locally is found through the run folder that `up` writes, so that nothing needs to be said twice;
`--address` and `--nats` reach any other deployment. Exit codes: 0 done, 1 refused or failed, 2 wrong use.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chassis.config import ConfigError
from chassis.errors import BusError
from shoal import (
    autoscale_words,
    batch_words,
    bench_words,
    cache_words,
    chat_words,
    dead_words,
    gateway_words,
    generate_words,
    init_words,
    join_words,
    keys_words,
    model_words,
    scale_words,
    serve_words,
    stats_words,
    up_words,
    usage_words,
)
from shoal.client import Accepted, AsyncClient, Params, ShoalError
from shoal.door import DoorError
from shoal.gateway_words import client_of
from shoal.launcher import Deployment, LaunchError, Plan
from shoal.ledger import Ledger
from shoal.looking import look
from shoal.models import ModelError
from shoal.why import render_ledger, request_id_of, why
from shoal.why import tell as tell_why

_TRACE_WAIT_S = 5.0
DEMO_PROMPT = "Why is the sky blue? Answer in two sentences."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see `shoal {arguments.command} --help`")
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int = arguments.do(arguments)
        return code
    except (ShoalError, LaunchError, ModelError, BusError, ConfigError, DoorError) as error:
        _say(f"shoal: {error}")
        if isinstance(error, ShoalError) and error.code in ("UNAUTHENTICATED", "HTTP 401"):
            _say("shoal: the key is taken from SHOAL_API_KEY; `shoal keys add` makes one")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# ---- the words -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shoal", description="Serves large language models as a pipeline.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    _add_running(commands)

    generate = commands.add_parser("generate", help="stream the answer to a prompt")
    generate_words.add_words(generate)
    _add_where(generate)
    generate.set_defaults(do=_generate)

    resume = commands.add_parser("resume", help="stream what follows of an answer, or all of it")
    generate_words.add_resume_words(resume)
    _add_where(resume)
    resume.set_defaults(do=_resume)

    chat = commands.add_parser("chat", help="talk with a model, turn by turn")
    chat_words.add_words(chat)
    _add_where(chat)
    chat.set_defaults(do=_chat)

    models = commands.add_parser("models", help="list the models that are served")
    _add_where(models)
    models.set_defaults(do=_models)

    model = commands.add_parser("model", help="keep models with versions: add, list, check, remove")
    model_words.add_words(model)

    init = commands.add_parser("init", help="write certificates, passwords, keys, permissions: once")
    init_words.add_words(init)
    init.set_defaults(do=_init)

    keys = commands.add_parser("keys", help="who may come in: add, list, revoke API keys")
    keys_words.add_words(keys)
    keys.set_defaults(do=_keys)

    _add_looking(commands)

    batch = commands.add_parser("batch", help="files of requests: submit, status, results, cancel; dead jobs")
    words = batch.add_subparsers(required=True, metavar="WORD")
    for word in batch_words.add_words(words):
        _add_run_dir(word)
        word.set_defaults(do=_batch)
    dead = words.add_parser("dead", help="jobs that killed who ran them: list, retry")
    dead_words.add_words(dead)
    _add_run_dir(dead)
    dead.set_defaults(do=_look, tell=dead_words.tell)

    bench = commands.add_parser("bench", help="say where a step's time goes, beside what the machine allows")
    bench_words.add_words(bench)
    return parser


def _add_running(commands: Any) -> None:
    """What runs a deployment."""
    up = commands.add_parser("up", help="run everything on this machine until Ctrl-C")
    up_words.add_words(up)
    _add_run_dir(up)
    up.set_defaults(do=_up)

    join = commands.add_parser("join", help="run services of this machine for a deployment elsewhere")
    join_words.add_words(join)
    _add_run_dir(join)
    join.set_defaults(do=_join)

    serve = commands.add_parser("serve", help="run everything in one process, for small machines")
    serve_words.add_words(serve, lambda words: _parser().parse_args(words))

    scale = commands.add_parser("scale", help="make what `shoal up` runs larger or smaller")
    scale_words.add_words(scale)
    _add_run_dir(scale)
    scale.set_defaults(do=_scale)

    demo = commands.add_parser("demo", help="start everything, ask one question, explain the answer, stop")
    demo.add_argument("prompt", nargs="?", default=DEMO_PROMPT)
    up_words.add_plan(demo)
    _add_run_dir(demo)
    demo.set_defaults(do=_demo, port=0, http_port=0, pipelines=1, gateways=1, kvstores=1)


def _add_looking(commands: Any) -> None:
    """What tells of a deployment."""
    tell = commands.add_parser("why", help="explain where a request's time went")
    tell.add_argument("request_id", type=request_id_of, help="or the id of an OpenAI answer (chatcmpl-...)")
    tell.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")
    _add_run_dir(tell)
    tell.set_defaults(do=_look, tell=tell_why)

    cache = commands.add_parser("cache", help="show what is cached, by pool and prefix")
    cache_words.add_words(cache)
    _add_run_dir(cache)
    cache.set_defaults(do=_look, tell=cache_words.tell)

    stats = commands.add_parser("stats", help="show what each model has done: batches, queues, times")
    stats_words.add_words(stats)
    _add_run_dir(stats)
    stats.set_defaults(do=_look, tell=stats_words.tell)

    usage = commands.add_parser("usage", help="sum up what was used, from the receipts of requests")
    usage_words.add_words(usage)
    _add_run_dir(usage)
    usage.set_defaults(do=_look, tell=usage_words.tell)


def _add_where(parser: argparse.ArgumentParser) -> None:
    gateway_words.add_words(parser)
    _add_run_dir(parser)


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("SHOAL_RUN_DIR", ".shoal"))
    parser.add_argument(
        "--run-dir", type=Path, default=default, help="logs, state (default: SHOAL_RUN_DIR or .shoal)"
    )


# ---- the commands ----------------------------------------------------------------------------------


def _up(arguments: argparse.Namespace) -> int:
    rules = autoscale_words.rules_of(arguments)
    asyncio.run(up_words.stay_up(up_words.plan_of(arguments), _say, rules))
    return 0


def _join(arguments: argparse.Namespace) -> int:
    return asyncio.run(join_words.stay(arguments, _say))


def _scale(arguments: argparse.Namespace) -> int:
    _print(scale_words.run(arguments))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    prompt, params = generate_words.prompt_of(arguments), generate_words.params_of(arguments)
    with client_of(arguments) as client:
        events = client.generate(prompt, params)
        generate_words.print_events(events, arguments.ids, several=(params.n or 1) > 1)
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    held = generate_words.held_of(arguments)
    with client_of(arguments) as client:
        generate_words.print_events(client.resume(arguments.request_id, held), arguments.ids)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        return chat_words.chat(client, arguments)


def _models(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        for model in client.models():
            chat = "chat" if model.chat else "no chat"
            _print(f"{model.name}  context {model.context_len_max}  vocabulary {model.vocab_size}  {chat}")
    return 0


def _init(arguments: argparse.Namespace) -> int:
    return _written(init_words.run, arguments)


def _keys(arguments: argparse.Namespace) -> int:
    return _written(keys_words.run, arguments)


def _written(run: Callable[[argparse.Namespace], tuple[str, str]], arguments: argparse.Namespace) -> int:
    try:
        text, beside = run(arguments)
    except OSError as error:
        raise ConfigError(str(error)) from None
    if text:
        _print(text)
    if beside:
        _say(beside)
    return 0


def _look(arguments: argparse.Namespace) -> int:
    text, whole = asyncio.run(look(arguments))
    _print(text)
    return 0 if whole else 1


def _batch(arguments: argparse.Namespace) -> int:
    try:
        return batch_words.run(arguments, _print, _say)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{where}{error.strerror or error}") from None


def _demo(arguments: argparse.Namespace) -> int:
    return asyncio.run(_show(up_words.alone_of(arguments), arguments.prompt))


async def _show(plan: Plan, question: str) -> int:
    shoal = Deployment(plan)
    shoal.prepare()
    stopped = up_words.on_signals(shoal)
    _say(f"starting NATS, kvstore, {plan.stages} stage workers, batcher and gateway ({plan.model})")
    try:
        if not await up_words.started(shoal, stopped):
            return 130
        _say(f"> {question}\n")
        if not await up_words.unless(stopped, _ask(shoal, question)):
            return 130
    finally:
        late = await shoal.stop()
    _say("stopped cleanly" if not late else f"had to be killed: {', '.join(late)}")
    return 1 if late else 0


async def _ask(shoal: Deployment, question: str) -> None:
    request_id = ""
    key = os.environ.get("SHOAL_API_KEY", "")
    async with AsyncClient(shoal.address, api_key=key, tls=shoal.tls) as client:
        async for event in client.generate([("user", question)], Params(temperature=0.0, max_tokens=128)):
            if isinstance(event, Accepted):
                request_id = event.request_id
            generate_words.print_event(event)
    story, _ = await why(shoal.nats_url, request_id, wait_s=_TRACE_WAIT_S)
    book: Ledger | None = story.ledger()
    _print(render_ledger(book))


# ---- between ---------------------------------------------------------------------------------------


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _say(text: str) -> None:
    """For people, not for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
