"""Every message has one home here: its value type, one function that builds it, one that parses it.

One file per proto. Parsers raise `BadMessage` on anything that is not a well-formed message.
"""


class BadMessage(Exception):
    """Bytes from outside that are not what the subject promises."""
