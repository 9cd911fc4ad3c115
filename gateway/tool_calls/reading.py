"""Pure. Text as a model writes it, divided into what it says and the functions it calls, as it comes.

Rules: however the text is cut, the same is read; text is held back only while it may be part of a call; what
looks like a call and is none (no name, one that nobody offered, no JSON) is text, unless it was begun to be
told. Space around calls is nobody's. A call that is cut off stays as far as it came.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.tool_calls.forms import MARKS, PYTHON_TAG, ToolForm
from gateway.tool_calls.object_scan import Malformed, ObjectScan

_NAME = re.compile(r"[\w.\-]{1,128}")
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
CALLS_MAX = 128


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins. `index`: from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next of its arguments, as JSON text."""

    index: int
    text: str


Read = Said | Called | Argued


class ToolReader:
    """Of one answer. `names`: of the functions that may be called."""

    def __init__(self, form: ToolForm, names: frozenset[str]) -> None:
        self._form = form
        self._marks = MARKS[form]
        self._names = names
        self.num_calls = 0
        self._rest = ""  # not judged yet
        self._raw = ""  # judged, and text again if there is no call
        self._mark_len = 0  # of it, what can't be judged anew
        self._out: list[Read] = []
        self._scan: ObjectScan | None = None
        self._begun = False  # the scan's call was told
        self._listed = False
        self._said_any = False
        self._do: Callable[[], bool] = self._begin_llama if form is ToolForm.LLAMA else self._in_text

    def feed(self, text: str) -> list[Read]:
        self._rest += text
        while self._do():
            pass
        return self._take()

    def end(self) -> list[Read]:
        """No more comes."""
        left = (self._raw + self._rest).strip()
        ending = self._do == self._between and self._told_here and self._marks.end.startswith(left)
        if self._begun or ending or (self.num_calls and not left):
            self._raw = self._rest = ""
        self._say(self._raw + self._rest)
        self._raw = self._rest = ""
        return self._take()

    def _take(self) -> list[Read]:
        found, self._out = self._out, []
        return found

    def _say(self, text: str) -> None:
        if not text:
            return
        self._said_any = True
        if self._out and isinstance(last := self._out[-1], Said):
            self._out[-1] = Said(last.text + text)
        else:
            self._out.append(Said(text))

    def _pass(self, length: int) -> None:
        """So much is judged."""
        self._raw += self._rest[:length]
        self._rest = self._rest[length:]

    # Each of these judges what it can of `rest`; False: more must come first.

    def _in_text(self) -> bool:
        rest, begin = self._rest, self._marks.begin
        at = rest.find(begin)
        if at < 0 or self.num_calls >= CALLS_MAX:
            keep = _partial(rest, begin)
            keep += len(rest[: len(rest) - keep]) - len(rest[: len(rest) - keep].rstrip())
            self._rest = rest[len(rest) - keep :]
            self._say(rest[: len(rest) - keep])
            return False
        before = rest[:at].rstrip()
        self._say(before)
        self._rest = rest[len(before) :]
        self._pass(at - len(before) + len(begin))
        self._mark_len = len(self._raw)
        self._do = self._between
        return True

    def _begin_llama(self) -> bool:
        """Calls stand at the beginning, or nowhere."""
        text = self._rest.lstrip()
        if not text or (text != PYTHON_TAG and PYTHON_TAG.startswith(text)):
            return False
        if text.startswith(PYTHON_TAG):
            self._pass(len(self._rest) - len(text) + len(PYTHON_TAG))
            self._do = self._between
        else:
            self._do = self._between if text[0] == "{" else self._only_text
        return True

    def _only_text(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _between(self) -> bool:
        """Behind the mark, or behind a call."""
        self._pass(len(self._rest) - len(self._rest.lstrip()))
        rest, marks = self._rest, self._marks
        if not rest:
            return False
        if marks.end and rest.startswith(marks.end):
            self._pass(len(marks.end))
            return self._region_ended()
        if marks.end and marks.end.startswith(rest):
            return False
        match rest[0]:
            case "{":
                return self._begin_object(None)
            case "[" if not self._listed and not self._told_here:
                self._listed = True
            case "," if self._listed:
                pass
            case ";" if self._form is ToolForm.LLAMA:
                pass
            case "]" if self._listed:
                self._listed = False
                self._pass(1)
                return self._region_ended() if not marks.end else True
            case _ if self._form is ToolForm.MISTRAL and not self._told_here and _NAME.match(rest):
                return self._mistral_name()
            case _:
                return self._no_call()
        self._pass(1)
        return True

    @property
    def _told_here(self) -> bool:
        """Some call was told since the mark."""
        return not self._raw.strip() and self.num_calls > 0

    def _mistral_name(self) -> bool:
        found = _NAME.match(self._rest)
        assert found is not None
        name, behind = found[0], self._rest[found.end() :]
        if behind.startswith(_CALL_ID):
            after_id = _NAME.match(behind, len(_CALL_ID))
            behind = "" if after_id is None else behind[after_id.end() :]
        if behind.startswith(_ARGS):
            behind = behind[len(_ARGS) :].lstrip()
        if behind.startswith("{"):
            self._pass(len(self._rest) - len(behind))
            return self._begin_object(name)
        if not behind or any(mark.startswith(behind) for mark in (_ARGS, _CALL_ID)):
            return False if len(self._rest) < 512 else self._no_call()
        return self._no_call()

    def _begin_object(self, name: str | None) -> bool:
        if self.num_calls >= CALLS_MAX:
            return self._no_call()
        strict = self._form is ToolForm.LLAMA and PYTHON_TAG not in self._raw
        self._scan, self._begun = ObjectScan(name, known_keys_only=strict), False
        self._do = self._in_object
        return True

    def _in_object(self) -> bool:
        scan, used, fine = self._scan, 0, True
        assert scan is not None
        try:
            for character in self._rest:
                if scan.over:
                    break
                scan.take(character)
                used += 1
                if not self._begun and scan.name is not None:
                    self._begin_call(scan.name)
        except Malformed:
            fine = False
        self._pass(used)
        if self._begun:
            self._raw, self._mark_len = "", 0
            if text := scan.arguments():
                self._out.append(Argued(self.num_calls - 1, text))
        if not fine:
            return self._no_call()
        if not scan.over:
            return False
        self._scan, self._begun = None, False
        self._do = self._between
        return True

    def _begin_call(self, name: str) -> None:
        """Raises Malformed for a function that nobody offered."""
        if name not in self._names:
            raise Malformed
        self._begun = True
        self.num_calls += 1
        self._out.append(Called(self.num_calls - 1, name))

    def _region_ended(self) -> bool:
        self._raw, self._mark_len, self._listed = "", 0, False
        self._do = self._in_text if self._marks.begin else self._only_text
        return True

    def _no_call(self) -> bool:
        """What was held back is text after all; marks behind it may be of calls."""
        if not self._begun:
            self._say(self._raw[: self._mark_len])
            self._rest = self._raw[self._mark_len :] + self._rest
        self._raw, self._mark_len, self._listed, self._begun = "", 0, False, False
        self._scan = None
        if self._marks.begin:
            self._do = self._in_text
        else:
            self._do = self._only_text
        return True


def _partial(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
