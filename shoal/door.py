"""The door of a one-process deployment for the commands that look at it: a unix socket in the run folder.

Only the user that runs it may connect. One line of JSON asks, `{"words": [...]}`; one object answers, with
`text` and `whole`, or with `error`; then the connection ends. Bounds on everything: what is too large, too
many or too slow is let go.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

WORDS_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 64 * 1024 * 1024
CONNECTIONS_MAX = 4
TIMEOUT_S = 30.0

Answer = Callable[[list[str]], Awaitable[tuple[str, bool]]]


class DoorError(Exception):
    """It did not answer, or said no; the message says why."""


async def ask(path: Path, words: Sequence[str]) -> tuple[str, bool]:
    """The text, and whether it is all. Raises DoorError."""
    try:
        with _near(path) as near:
            reader, writer = await asyncio.open_unix_connection(near, limit=ANSWER_BYTES_MAX)
        try:
            writer.write(json.dumps({"words": list(words)}).encode() + b"\n")
            async with asyncio.timeout(TIMEOUT_S):
                answer = json.loads(await reader.readline() or b"{}")
        finally:
            writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        raise DoorError(f"{path}: {error or 'no answer'}") from None
    match answer:
        case {"text": str(text), "whole": bool(whole)}:
            return text, whole
        case {"error": str(why)}:
            raise DoorError(why)
        case _:
            raise DoorError(f"{path}: no answer")


@asynccontextmanager
async def opened(path: Path, answer: Answer) -> AsyncIterator[None]:
    """Answers while it lasts. Raises OSError when it cannot."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(TIMEOUT_S):
                    told = await _told(await reader.readline(), answer)
                    writer.write(json.dumps(told).encode() + b"\n")
                    await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass  # whoever asks so gets nothing
        finally:
            connections -= 1
            writer.close()

    listener = _listener(path)
    server = await asyncio.start_unix_server(serve, sock=listener, limit=WORDS_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        _unlink(path)


async def _told(line: bytes, answer: Answer) -> dict[str, object]:
    try:
        match json.loads(line):
            case {"words": list(words)} if all(isinstance(word, str) for word in words):
                text, whole = await answer(words)
                return {"text": text, "whole": whole}
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:  # of what it looks at: the services go on
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "words: a list of strings"}


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _listener(path: Path) -> socket.socket:
    """Nobody else's from the start: the file is made with its rights."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with _near(path) as near:
            listener.bind(near)
        listener.listen(CONNECTIONS_MAX)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    listener.setblocking(False)
    return listener


@contextmanager
def _near(path: Path) -> Iterator[str]:
    """A name of the same file that is short enough for an address, however deep the folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
