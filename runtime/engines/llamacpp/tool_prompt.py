"""Tools for a model whose chat template does not know them: told in words, in the form of Hermes.

The system is told which functions there are and how to call one; calls become text of the
assistant, and what tools answer becomes text of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import RequestError
from ...protocol.openai.generate import ChatMessage
from ...protocol.openai.tool_calls import CALL_BEGIN, CALL_END

_HEAD: Final = """You may call functions to answer the user. Their signatures:
<tools>
"""
_TAIL: Final = f"""
</tools>
To call one, write its name and arguments as JSON between these tags, and nothing else:
{CALL_BEGIN}
{{"name": <function>, "arguments": <arguments>}}
{CALL_END}"""

Dumps = Callable[[Any], str]


def calls_of(message: ChatMessage, index: int) -> list[dict[str, Any]]:
    """The calls of an assistant, their arguments decoded; `RequestError` if those are no JSON."""
    if not message.tool_calls:
        return []
    where = f"messages[{index}].tool_calls"
    try:
        calls: list[dict[str, Any]] = json.loads(message.tool_calls)
        for call in calls:
            called = call["function"]
            called["arguments"] = json.loads(called["arguments"] or "{}")
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise RequestError(
            f"'{where}' has arguments that are no JSON: {error}", param=where
        ) from None
    return calls


def told_in_words(
    messages: Sequence[ChatMessage], tools: Sequence[Any], dumps: Dumps
) -> list[ChatMessage]:
    """The same conversation in turns of system, user and assistant alone.

    What several tools answer is one turn: many templates want user and assistant to alternate.
    """
    turns: list[ChatMessage] = []
    last = ""
    for index, message in enumerate(messages):
        role, pieces = message.role, [message.content] if message.content else []
        pieces += [
            f"{CALL_BEGIN}\n{dumps(_called(call))}\n{CALL_END}" for call in calls_of(message, index)
        ]
        if role == "tool":
            pieces = [f"<tool_response>\n{message.content}\n</tool_response>"]
        if role == last == "tool":
            pieces.insert(0, turns.pop().content)
        turns.append(ChatMessage("user" if role == "tool" else role, "\n".join(pieces)))
        last = role
    if tools:
        told = _HEAD + "\n".join(map(dumps, tools)) + _TAIL
        if turns[0].role == "system":
            told = f"{turns.pop(0).content}\n\n{told}"
        turns.insert(0, ChatMessage("system", told))
    return turns


def _called(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}
