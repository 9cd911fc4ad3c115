"""Pure. How the families of models write calls of functions, told by their chat templates."""

import hashlib
import re
from dataclasses import dataclass
from enum import Enum


class ToolForm(Enum):
    HERMES = (
        "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>: Qwen, SmolLM2, whoever has no form
    )
    LLAMA = "llama"  # {"name": ..., "parameters": ...} at the beginning, perhaps behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": ...}], or [TOOL_CALLS]name[ARGS]{...}
    PHI = "phi"  # <|tool_call|>[{"name": ..., "arguments": ...}]<|/tool_call|>


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around calls. `listed`: in a JSON list."""

    begin: str
    end: str
    between: str
    arguments: str
    listed: bool


MARKS = {
    ToolForm.HERMES: Marks("<tool_call>", "</tool_call>", "\n", "arguments", False),
    ToolForm.LLAMA: Marks("", "", "; ", "parameters", False),
    ToolForm.MISTRAL: Marks("[TOOL_CALLS]", "", ", ", "arguments", True),
    ToolForm.PHI: Marks("<|tool_call|>", "<|/tool_call|>", ", ", "arguments", True),
}
PYTHON_TAG = "<|python_tag|>"
_TOOLS = re.compile(r"\btools\b")


def short_id(name: str) -> str:
    """Of a call, as Mistral's templates want it: nine letters and digits."""
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:9]


def form_of(template: str) -> ToolForm:
    if MARKS[ToolForm.MISTRAL].begin in template:
        return ToolForm.MISTRAL
    if MARKS[ToolForm.PHI].begin in template:
        return ToolForm.PHI
    if PYTHON_TAG in template or ("ipython" in template and '"parameters"' in template):
        return ToolForm.LLAMA
    return ToolForm.HERMES


def knows_tools(template: str) -> bool:
    """It tells the model of tools by itself."""
    return _TOOLS.search(template) is not None
