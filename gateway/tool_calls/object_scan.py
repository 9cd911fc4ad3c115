"""Pure. One call's JSON object as it comes in, character by character: its name, then its arguments as text.

Arguments are passed on as the model wrote them; what it wrote as a string of JSON is what the string says.
"""

import json
from enum import Enum

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id")
KEY_LEN_MAX = 256
_SPACE = " \t\n\r"


class Malformed(Exception):
    """It is no call."""


class _At(Enum):
    BEGIN = "begin"
    KEY = "key"  # or the end
    COLON = "colon"
    VALUE = "value"
    IN_VALUE = "in value"
    COMMA = "comma"  # or the end
    END = "end"


class ObjectScan:
    """`name` None: it comes in the object; else the object is the arguments."""

    def __init__(self, name: str | None = None, known_keys_only: bool = False) -> None:
        self.name = name
        self.over = False
        self._known_keys_only = known_keys_only
        self._bare = name is not None
        self._at = _At.VALUE if self._bare else _At.BEGIN
        self._key = ""
        self._text: list[str] = []  # of the key or value under way
        self._quoted = self._escaped = False
        self._depth = 0
        self._arguments: list[str] = []  # not passed on yet
        self._any = self._bare

    def take(self, character: str) -> None:
        """Raises Malformed."""
        match self._at:
            case _At.IN_VALUE:
                self._in_value(character)
            case _At.KEY if self._quoted:
                self._in_key(character)
            case _ if character in _SPACE:
                pass
            case _At.BEGIN if character == "{":
                self._at = _At.KEY
            case _At.KEY if character == '"':
                self._quoted, self._text = True, ['"']
            case _At.KEY | _At.COMMA if character == "}":
                self._ended()
            case _At.COMMA if character == ",":
                self._at = _At.KEY
            case _At.COLON if character == ":":
                self._at = _At.VALUE
            case _At.VALUE:
                self._at, self._text = _At.IN_VALUE, []
                self._in_value(character)
            case _:
                raise Malformed

    def arguments(self) -> str:
        """What came of them since the last time, once the name is known."""
        if self.name is None:
            return ""
        found, self._arguments = self._arguments, []
        return "".join(found)

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        if self._quote_ends(character):
            self._key = _string(self._text)
            if self._known_keys_only and self._key not in KNOWN_KEYS:
                raise Malformed
            self._at = _At.COLON
        elif len(self._text) > KEY_LEN_MAX:
            raise Malformed

    def _quote_ends(self, character: str) -> bool:
        """Within a string, whether this is the quote behind it."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            return True
        return False

    def _in_value(self, character: str) -> None:
        first = not self._text
        if not first and not self._quoted and not self._depth and (character in ",}" or character in _SPACE):
            self._value_ended()  # a number, true, false or null, ended by what follows
            self.take(character)
            return
        self._keep(character)
        if self._quoted:
            if self._quote_ends(character) and not self._depth:
                self._value_ended()
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth < 0:
                raise Malformed
            if not self._depth:
                self._value_ended()

    def _keep(self, character: str) -> None:
        first = self._text[0] if self._text else character
        if self._is_arguments and first != '"':
            if first != "{":
                raise Malformed
            self._arguments.append(character)
            self._text = self._text or [character]
            return
        self._text.append(character)
        if self._key in NAME_KEYS and len(self._text) > KEY_LEN_MAX:
            raise Malformed

    @property
    def _is_arguments(self) -> bool:
        return self._bare or self._key in ARGUMENT_KEYS

    def _value_ended(self) -> None:
        self._at = _At.COMMA
        if self._is_arguments:
            self._any = True
            if self._text[0] == '"':
                self._arguments.append(_string(self._text))
            if self._bare:
                self.over = True
        elif self._key in NAME_KEYS:
            self.name = _string(self._text)

    def _ended(self) -> None:
        self._at = _At.END
        if self.name is None:
            raise Malformed
        if not self._any:
            self._arguments.append("{}")
        self.over = True


def _string(text: list[str]) -> str:
    try:
        value = json.loads("".join(text), strict=False)
    except ValueError:
        raise Malformed from None
    if not isinstance(value, str):
        raise Malformed
    return value
