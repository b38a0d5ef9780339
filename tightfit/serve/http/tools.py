"""Functions the model may call: into the chat template, and out of the text that comes back.

Models write calls in their own ways; two are read: `<tool_call>{…}</tool_call>` (Hermes, Qwen) and a bare JSON object
with a name and arguments or parameters (Llama 3). Where the client insists on a call, a grammar makes the answer one.
"""

import json
import re
import secrets
from typing import Any

from tightfit.errors import UserError
from tightfit.serve.http.protocol import ChatBody, Tool
from tightfit.serve.requests.grammar import Grammar

MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
Call = dict[str, Any]


def offered(body: ChatBody) -> list[Tool]:
    """The tools the model is told of."""
    return [] if body.tool_choice == "none" else body.tools or []


def forced_grammar(body: ChatBody) -> Grammar | None:
    """The form of an answer that has to be a call; None where the model may choose."""
    tools = offered(body)
    wanted = [tool for tool in tools if _is_wanted(tool, body.tool_choice)]
    if body.tool_choice is None or body.tool_choice in ("auto", "none"):
        return None
    if not wanted:
        raise UserError("tool_choice asks for a call, but names no function that is among the tools")
    calls = [_call_schema(tool) for tool in wanted]
    return Grammar("json_schema", json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls}))


def found_calls(text: str) -> tuple[str, list[Call]]:
    """The text without the calls in it, and the calls as OpenAI writes them."""
    marked = [call for each in MARKED.findall(text) if (call := _read(each)) is not None]
    if marked:
        return MARKED.sub("", text).strip(), marked
    whole = _read(text.strip())
    return ("", [whole]) if whole is not None else (text, [])


def _read(text: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
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


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
