"""Answers of chats with tools: the calls that a model writes into its text, as OpenAI's clients read them.

What a call looks like in the text, `tool_calls.py` knows; everything else of an answer is `answers.py`.
"""

from __future__ import annotations

import msgspec

from .answers import ChatAnswer, ChatDelta, ChatReply, FunctionDelta, ToolCall, ToolCallDelta
from .generate import Delta, FinishReason
from .tool_calls import CallPiece, ToolCallParser


class ToolAnswer(ChatAnswer):
    """One choice of an answer of `/v1/chat/completions` to a request with tools."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        *,
        wants_usage: bool,
        index: int = 0,
        tells_ids: bool = False,
    ) -> None:
        super().__init__(
            answer_id, model, created, wants_usage=wants_usage, index=index, tells_ids=tells_ids
        )
        self._call_prefix = f"call_{answer_id}_{index}" if index else f"call_{answer_id}"
        self._parser = ToolCallParser()
        self._called: list[tuple[str, list[str]]] = []

    def add_event(self, delta: Delta) -> bytes:
        events = [
            super(ToolAnswer, self).add_event(Delta(piece))
            if isinstance(piece, str)
            else self._call_event(piece)
            for piece in self._pieces(delta)
        ]
        if delta.logprobs or delta.finish_reason is not None or self._ids is not None:
            events.append(super().add_event(self._rest(delta)))
        return b"".join(events)

    def add_text(self, delta: Delta) -> None:
        for piece in self._pieces(delta):
            if isinstance(piece, str):
                super().add_text(Delta(piece))
            elif piece.name:
                self._called.append((piece.name, [piece.arguments]))
            else:
                self._called[-1][1].append(piece.arguments)
        super().add_text(self._rest(delta))

    def _reply(self, text: str) -> ChatReply:
        if not self._called:
            return super()._reply(text)
        calls = [
            ToolCall(self._call_id(index), FunctionDelta(name, "".join(arguments)))
            for index, (name, arguments) in enumerate(self._called)
        ]
        return ChatReply("assistant", text or None, calls)

    def _pieces(self, delta: Delta) -> list[str | CallPiece]:
        pieces = self._parser.push(delta.text) if delta.text else []
        return pieces if delta.finish_reason is None else pieces + self._parser.finish()

    def _rest(self, delta: Delta) -> Delta:
        """What is left of a delta behind its text and calls."""
        reason = delta.finish_reason
        if reason is FinishReason.STOP and self._parser.call_count:
            reason = FinishReason.TOOL_CALLS
        return msgspec.structs.replace(delta, text="", finish_reason=reason)

    def _call_event(self, piece: CallPiece) -> bytes:
        if piece.name:
            call = ToolCallDelta(
                piece.index,
                FunctionDelta(piece.name, piece.arguments),
                self._call_id(piece.index),
                "function",
            )
        else:
            call = ToolCallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
        role = None if self._is_begun else "assistant"
        self._is_begun = True
        return self._event(ChatDelta(role=role, tool_calls=[call]), Delta())

    def _call_id(self, index: int) -> str:
        return f"{self._call_prefix}_{index}"
