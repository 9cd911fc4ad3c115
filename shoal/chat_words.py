"""`shoal chat`: a conversation in a terminal. Answers stream; Ctrl-C ends the answer, not the chat.

Lines that begin with a slash are for the chat itself, two slashes begin a line with one; a line that ends in
a backslash goes on in the next.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shoal import generate_words
from shoal.client import Accepted, Client, Conversation, Delta, Event, Finished, ShoalError

HELP = """\
/again         answer the last question once more
/undo          forget the last question and its answer
/reset         forget all of it but the system prompt
/system TEXT   another system prompt (nothing: none), from here on
/quit          leave (or Ctrl-D); Ctrl-C ends an answer"""
Read = Callable[[str], str]


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", help="a system prompt")
    generate_words.add_params(parser)


def chat(client: Client, arguments: argparse.Namespace) -> int:
    """Until `/quit` or the end of the input. Raises ShoalError for words that no answer could have."""
    talk = _Talk(Conversation(client, generate_words.params_of(arguments), arguments.system))
    read = _reader()
    if sys.stdin.isatty():
        _say("/help says what there is besides talking")
    lines = 0
    while (line := _line(read)) is not None:
        lines += 1
        if not talk.take(line):
            break
    if not lines:
        _say("nothing was said: each line of standard input is a turn")
    return 0


class _Talk:
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._request_id = ""

    def take(self, line: str) -> bool:
        """Whether there is more to come."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                _say(HELP)
            case "/reset":
                self._conversation.reset()
            case "/undo" | "/again":
                said = self._conversation.undo()
                if said is None:
                    _say("nothing was said")
                elif word == "/again":
                    self._answer(said)
            case "/system":
                self._conversation.system(rest.strip())
            case _ if word.startswith("/") and not word.startswith("//"):
                _say(f"{word} is nothing; /help says what there is")
            case _:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _answer(self, text: str) -> None:
        events = self._conversation.stream(text)
        try:
            with _interrupts(self._conversation.cancel) as pressed:
                for event in events:
                    self._show(event)
                    if pressed.is_set() and isinstance(event, Accepted):  # pressed before there was a call
                        self._conversation.cancel()
        except ShoalError as error:
            _say(f"\nshoal: {error}")

    def _show(self, event: Event) -> None:
        match event:
            case Accepted(request_id=request_id):
                self._request_id = request_id
            case Delta(text=text):
                _write(text)
            case Finished() as end:
                rate = f", {end.output_tokens / (end.decode_us / 1e6):.1f}/s" if end.decode_us else ""
                first_ms = (end.queued_us + end.prefill_us) / 1000
                _write("\n")
                _say(
                    f"[{end.reason}: {end.output_tokens} tokens{rate}, first after {first_ms:.0f} ms,"
                    f" {end.cached_tokens} of {end.prompt_tokens} cached, request {self._request_id}]"
                )


@contextmanager
def _interrupts(cancel: Callable[[], None]) -> Iterator[threading.Event]:
    """Ctrl-C cancels meanwhile; in a thread of its own, because the reader may hold any lock."""
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        pressed.set()
        threading.Thread(target=cancel, daemon=True).start()

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _reader() -> Read:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - what input() edits lines with

        return input
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no UTF-8 is refused where it is sent

    def read(prompt: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def _line(read: Read) -> str | None:
    """What was said; None at the end of the input."""
    lines: list[str] = []
    try:
        while True:
            line = read("... " if lines else "> ")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
    except EOFError:
        return "\n".join(lines) if lines else None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """For people, not for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
