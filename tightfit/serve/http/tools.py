"""Functions the model may call: into the chat template, and out of the text that comes back.

Models write calls in their own ways; two are read: `<tool_call>{…}</tool_call>` (Hermes, Qwen) and a bare JSON object
with a name and arguments or parameters (Llama 3). In both places a list may stand for several calls (SmolLM2). Where
the client insists on a call, a grammar makes the answer one.
"""

import json
import re
import secrets
from typing import Any

from tightfit.errors import UserError
from tightfit.serve.http.protocol import ChatBody, Tool
from tightfit.serve.requests.grammar import Grammar
from tightfit.serve.requests.text_stream import overlap

MARK = "<tool_call>"
MARKED = re.compile(r"<tool_call>\s*(\{.*?\}|\[.*?\])\s*(?:</tool_call>|$)", re.DOTALL)
Call = dict[str, Any]


def offered(body: ChatBody) -> list[Tool]:
    """The tools the model is told of."""
    return [] if body.tool_choice == "none" else body.tools or []


def forced_grammar(body: ChatBody) -> Grammar | None:
    """The grammar of an answer that must be a call; None where the model may choose."""
    tools = offered(body)
    wanted = [tool for tool in tools if _is_wanted(tool, body.tool_choice)]
    if body.tool_choice is None or body.tool_choice in ("auto", "none"):
        return None
    if not wanted:
        raise UserError("tool_choice asks for a call, but names no function that is among the tools")
    try:
        return Grammar("json_schema", json.dumps(_calls_schema(wanted)))
    except RecursionError:
        raise UserError("tools have parameters that are nested too deeply; give flatter ones") from None


def found_calls(text: str) -> tuple[str, list[Call]]:
    """The text without the calls in it, and the calls as OpenAI writes them."""
    marked = [call for each in MARKED.findall(text) for call in _read(each)]
    if marked:
        return MARKED.sub("", text).strip(), marked
    whole = _read(text.strip())
    return ("", whole) if whole else (text, [])


class CallStream:
    """An answer that may have calls in it, as it comes: text is shown as soon as it can be no part of one."""

    def __init__(self) -> None:
        self._text, self._shown = "", 0

    def push(self, text: str) -> str:
        """What may be shown now that `text` has come; nothing where all of the answer may be a call."""
        self._text += text
        if self._text.lstrip()[:1] in ("", "{", "["):
            return ""
        marked = self._text.find(MARK)
        end = marked if marked >= 0 else len(self._text) - overlap(self._text, MARK)
        shown, self._shown = self._text[self._shown : end], max(self._shown, end)
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """The text that was not shown, and the calls, now that nothing follows."""
        text, calls = found_calls(self._text)
        begun = self._text[: self._shown]
        return text.removeprefix(begun.strip() if calls else begun), calls


def _read(text: str) -> list[Call]:
    """The calls in a text that is the JSON of a call or of a list of calls alone; else none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].isprintable():
        return None  # half a surrogate pair is text in JSON, but nowhere else
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _is_wanted(tool: Tool, choice: Any) -> bool:
    if isinstance(choice, dict):
        function = choice.get("function")
        return isinstance(function, dict) and function.get("name") == tool.function.name
    return choice == "required"


def _calls_schema(tools: list[Tool]) -> dict[str, Any]:
    """The schema of a call of one of `tools`."""
    if len(tools) == 1:
        return _call_schema(tools[0], "#")
    return {"anyOf": [_call_schema(tool, f"#/anyOf/{place}") for place, tool in enumerate(tools)]}


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """The schema of a call to `tool`, which will stand at the JSON pointer `place`."""
    parameters = tool.function.parameters or {"type": "object"}
    arguments = _moved(parameters, f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema with its internal references rebased, for use as the part of another one at `place`."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(own := schema.get("$ref"), str) and own.startswith("#"):
        moved["$ref"] = place + own[1:]
    return moved
