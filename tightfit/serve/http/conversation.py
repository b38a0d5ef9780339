"""From the messages of a chat to the tokens of a prompt."""

from typing import Any

from tightfit.errors import UserError
from tightfit.models.text.tokenizer import Message, Tokenizer
from tightfit.serve.http.protocol import ChatBody, refuse_endless
from tightfit.serve.http.tools import offered


def chat_tokens(body: ChatBody, tokenizer: Tokenizer, room: int) -> list[int]:
    """The conversation in the model's own template, up to where the answer begins; refused beyond `room` tokens."""
    messages = [_message(each, index) for index, each in enumerate(body.messages)]
    tools = [tool.model_dump() for tool in offered(body)]
    if tools and "tools" not in (tokenizer.chat_template or ""):
        raise UserError("the model's chat template has no tools; leave `tools` out or give another model")
    rendered = tokenizer.render_chat(
        messages, add_generation_prompt=True, tools=tools or None, settings=body.chat_template_kwargs
    )
    refuse_endless(rendered, tokenizer, room)
    return tokenizer.encode(rendered, parse_special=True)


def _message(given: dict[str, Any], index: int) -> Message:
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, index) for part in content)
    if content is None and given.get("role") == "assistant":
        content = ""  # it only called tools
    return {**given, "content": content}


def _part(part: Any, index: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise UserError(f"message {index} has a part that is not text; this model reads text only")
    return str(part["text"])
