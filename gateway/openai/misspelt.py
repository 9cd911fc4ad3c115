"""Pure. Fields of a body that nobody knows, but that come so near to one of ours that they must mean it.

Other unknown fields are ignored, as engines beside this one do: OpenAI's that mean nothing here, and theirs.
Ignoring a misspelt one would answer another question than was asked, and say nothing of it.
"""

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any

from gateway.openai.errors import BadField

LIKENESS_MIN = 0.85  # of letters in common, from 0 to 1
NAME_LEN_MIN, NAME_LEN_MAX = 4, 40  # shorter ones are near to too much
LOOKED_AT_MAX = 16


def check_spelling(body: Mapping[str, Any], known: Collection[str]) -> None:
    """A field that stands in the body itself is not what another one means. Raises BadField."""
    unknown = [name for name in body if name not in known and NAME_LEN_MIN <= len(name) <= NAME_LEN_MAX]
    for name in unknown[:LOOKED_AT_MAX]:
        likely = [(_likeness(name, field), field) for field in known if field not in body]
        likeness, meant = max(likely, default=(0.0, ""))
        if likeness >= LIKENESS_MIN:
            raise BadField(name, f"unknown; did you mean {meant}?")


def _likeness(name: str, field: str) -> float:
    """1 for those that differ in underscores and capitals only."""
    matcher = SequenceMatcher(None, _letters(name), _letters(field), autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= LIKENESS_MIN else 0.0


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
