"""OpenAI's requests as structs, and what they mean to an engine.

Requests are decoded and checked here, so that everything behind sees a valid `GenerateRequest`.
The structs have what is obeyed; of all other fields the table says what becomes of them (`fields.py`).

**What can be long is measured before it is decoded.** A body of four megabytes may hold two million
numbers, each of which becomes an object: so the prompt, the stop strings and whatever is refused
anyway stay undecoded (`Raw`) until the model, and so the context that they have to fit, is known.
What this module does not do: the form of an answer (`forms.py`), answers (`answers.py`) and HTTP
(`runtime/http`).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from ...errors import ContextLengthError, RequestError
from ..undecodable import UNDECODABLE
from .fields import FORMS
from .forms import form_of
from .generate import (
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
    UNSAID,
    GenerateRequest,
    MinP,
    Natural,
    Penalty,
    RepetitionPenalty,
    SamplingDefaults,
    Temperature,
    TokenId,
    TopP,
)
from .messages import check_chars, turns_of
from .shaping import (
    ABSENT,
    chat_logprobs,
    check_length,
    completion_logprobs,
    decode_json,
    dropped_tools,
    is_absent,
    logit_bias,
    object_text,
    refuse,
    tool_choice,
    tools_text,
)

CONTEXT_TOKENS_MAX: Final = 1 << 20
"""The context of a model that does not tell its own; the largest that can be configured."""
STOP_BYTES_MAX: Final = STOP_CHARS_MAX * len(r"\ud83d\ude00") + STOP_STRINGS_MAX * 64
"""As long as JSON of allowed stop strings can be."""
CHOICES_MAX: Final = 128
"""Of one answer, to all of its prompts; OpenAI's own bound."""
COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's default for `max_tokens` of `/v1/completions`; chat has none."""
_STOP_TOKENS_BYTES_MAX: Final = STOP_TOKENS_MAX * 64
_UNBOUNDED: Final = -1
"""A `max_tokens` that bounds nothing, as llama.cpp's server has it."""
_TURN: Final = "messages["
"""How an engine names a turn, with its number behind."""
SAMPLED: Final = tuple(n for n in SamplingDefaults.__struct_fields__ if n != "max_tokens")
_sampled_values: Final = attrgetter(*SAMPLED)
_form_values: Final = attrgetter(*FORMS)
_NO_FORMS: Final = (ABSENT,) * len(FORMS)
_end_values: Final = attrgetter("stop", "stop_token_ids", "ignore_eos", "min_tokens")
_NO_ENDS: Final = (ABSENT, ABSENT, None, None)

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokensMax = Annotated[int, msgspec.Meta(ge=_UNBOUNDED, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed answer carries besides its text."""

    include_usage: bool | None = None


class BodyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the bodies of all endpoints have in common. Null means: not given."""

    model: str | None = None

    kept: ClassVar[tuple[str, ...]] = ()
    """The fields that hold what a request keeps of its body."""
    tool_types: ClassVar[tuple[str | None, ...]] = ("function",)
    """Of tools that the client runs itself; others are left out."""
    names: ClassVar[Mapping[str, str]] = {}
    """How the client calls what an engine refuses, where it calls it otherwise."""

    @property
    def is_streamed(self) -> bool:
        return bool(getattr(self, "stream", None))

    @property
    def choices_each(self) -> int:
        """How many answers are wanted to each prompt."""
        return 1

    @property
    def content_bytes(self) -> int:
        """The part of the body that a request keeps."""
        size = sum(map(len, self.forms.values()))
        for name in self.kept:
            size += len(getattr(self, name) or b"")
        return size

    @property
    def forms(self) -> dict[str, Raw]:
        """The fields that say what form the answer has, as far as they are given."""
        return {}

    @property
    def dropped_tools(self) -> list[tuple[int, str]]:
        """Index and type of each tool that is left out; of a request that `to_generate` has checked."""
        return dropped_tools(getattr(self, "tools", ABSENT), self.tool_types)

    def turn_places(self) -> list[str]:
        """Where in the body each turn of the chat is, if its turns are not its `messages`."""
        return []

    def called(self, param: str) -> str:
        """How the client calls what an engine refuses as `param`."""
        turn, mark, _ = param.removeprefix(_TURN).partition("]")
        if mark and param.startswith(_TURN) and (places := self.turn_places()):
            return places[int(turn)]
        return self.names.get(param, param)

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        sampling: SamplingDefaults = UNSAID,
    ) -> GenerateRequest:
        """What the engine of `model` is asked, with its `sampling` where the client says nothing.

        Raises `RequestError` naming the parameter.
        """
        return GenerateRequest(model=model, **self.asked(context_tokens_max, sampling))

    @abstractmethod
    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        """The arguments of `GenerateRequest` besides the model."""

    def to_choices(
        self, first: GenerateRequest, context_tokens_max: int, inputs_max: int
    ) -> list[GenerateRequest]:
        """A request for each choice of the answer, by its index, of which `to_generate` said the `first`.

        Those of one prompt stand together; a seed is that of the first, and one more for each. Raises
        `RequestError` if they are more than `CHOICES_MAX`, or of embeddings more than `inputs_max`.
        """
        del context_tokens_max, inputs_max
        return [first]


def drawn(given: Iterable[Any], sampling: SamplingDefaults) -> dict[str, Any]:
    """How tokens are drawn, as arguments of `GenerateRequest`: as `given`, by `SAMPLED`, or else by default."""
    found: dict[str, Any] = {}
    for name, said, default in zip(SAMPLED, given, _sampled_values(sampling), strict=True):
        if (value := default if said is None else said) is not None:
            found[name] = value
    if found.get("top_k") == -1:
        found["top_k"] = 0
    return found


class SampledRequest(BodyRequest, frozen=True, kw_only=True):
    """What says how an answer's tokens are drawn, and what ends it."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: MinP | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Raw = ABSENT
    stop: Raw = ABSENT
    stop_token_ids: Raw = ABSENT
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None

    def sampled(self, sampling: SamplingDefaults) -> dict[str, Any]:
        """What it says of an answer, as arguments of `GenerateRequest`: how tokens are drawn, end, form."""
        found = drawn(_sampled_values(self), sampling)
        if forms := self.forms:
            found |= form_of(forms)
        if self.seed is not None:
            found["seed"] = self.seed
        if _end_values(self) != _NO_ENDS:
            found["stop"] = stop_strings(self.stop)
            found["stop_token_ids"] = _stop_token_ids(self.stop_token_ids)
            found["ignore_eos"] = bool(self.ignore_eos)
            found["min_tokens"] = self.min_tokens or 0
        if self.logit_bias is not ABSENT:
            found["logit_bias"] = logit_bias(self.logit_bias)
        for name in ("return_token_ids", "cache_prompt"):
            if (said := getattr(self, name, None)) is not None:
                found[name] = said
        return found

    def _tokens_max(self, name: str, default: int | None, least: int = 1) -> int | None:
        """The bound of the answer, which is called `name`, or the model's `default`; None for none.

        The `least` is 0 where something else is answered.
        """
        tokens_max: int | None = getattr(self, name)
        if tokens_max is None:
            return default and max(default, self.min_tokens or 0)
        if tokens_max == _UNBOUNDED:
            return None
        if tokens_max < least:
            unless = ", or have 'echo'" if isinstance(self, CompletionRequest) else ""
            raise RequestError(
                f"'{name}' is 0; it must be at least 1, or -1 for no bound but the context{unless}",
                param=name,
            )
        if (self.min_tokens or 0) > tokens_max:
            raise RequestError(
                f"'min_tokens' is {self.min_tokens}, but '{name}' is {tokens_max}",
                param="min_tokens",
            )
        return tokens_max


class SharedRequest(SampledRequest, frozen=True, kw_only=True):
    """What chats and completions take alike."""

    max_tokens: TokensMax | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    logprobs: Raw = ABSENT
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    response_format: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    guided_json: Raw = ABSENT
    guided_regex: Raw = ABSENT
    guided_choice: Raw = ABSENT
    guided_grammar: Raw = ABSENT
    regex: Raw = ABSENT
    ebnf: Raw = ABSENT
    json_schema: Raw = ABSENT
    grammar: Raw = ABSENT

    @property
    def choices_each(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that carries the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def forms(self) -> dict[str, Raw]:
        values = _form_values(self)
        if values == _NO_FORMS:
            return {}
        return {name: raw for name, raw in zip(FORMS, values, strict=True) if not is_absent(raw)}

    def called(self, param: str) -> str:
        """See `BodyRequest`: a form has many names."""
        return [*self.forms][-1] if param in FORMS else param

    def _refuse(self) -> None:
        if not 1 <= self.choices_each <= CHOICES_MAX:
            raise RequestError(
                f"'n' is {self.n}; an answer has 1 to {CHOICES_MAX} choices", param="n"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "'stream_options' is only allowed when 'stream' is true", param="stream_options"
            )

    def to_choices(
        self, first: GenerateRequest, context_tokens_max: int, inputs_max: int
    ) -> list[GenerateRequest]:
        del inputs_max
        prompts: list[Prompt] = []
        if isinstance(self, CompletionRequest) and _holds_prompts(self.prompt):
            prompts = all_prompts(self.prompt, context_tokens_max)
        each, seed = self.choices_each, first.seed
        if each == 1 and not prompts:
            return [first]
        if each * len(prompts) > CHOICES_MAX:
            raise RequestError(
                f"'n' is {each}, for each of {len(prompts)} prompts; an answer has at most {CHOICES_MAX} choices",
                param="n",
            )
        asked = [replace(first, prompt=text, token_ids=ids) for text, ids in prompts]
        return [
            one
            if number == 0 or seed is None
            # So many behind it, of those that JSON's 64 bits hold.
            else replace(one, seed=(seed + number + 2**63) % 2**64 - 2**63)
            for one in asked or [first]
            for number in range(each)
        ]


class ChatCompletionRequest(SharedRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Raw
    max_completion_tokens: TokensMax | None = None
    top_logprobs: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Raw = ABSENT
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    kept: ClassVar[tuple[str, ...]] = ("messages", "tools")

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        self._refuse()
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        tools, names = tools_text(self.tools)
        turns = turns_of(self.messages, context_tokens_max)
        continues = bool(self.continue_final_message)
        if continues and turns[-1].role != "assistant":
            raise RequestError(
                "'continue_final_message' needs an assistant's turn as the last of 'messages'",
                param="continue_final_message",
            )
        if self.add_generation_prompt is continues:
            raise RequestError(
                "'add_generation_prompt' must be true, or with 'continue_final_message' false",
                param="add_generation_prompt",
            )
        return dict(
            messages=turns,
            max_tokens=self._tokens_max(name, sampling.max_tokens),
            logprobs=chat_logprobs(self.logprobs, self.top_logprobs),
            tools=tools,
            tool_choice=tool_choice(self.tool_choice, names),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            chat_template_kwargs=object_text(self.chat_template_kwargs, "chat_template_kwargs"),
            continue_final_message=continues,
            **self.sampled(sampling),
        )


class CompletionRequest(SharedRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Raw
    echo: bool | None = None
    best_of: Int64 | None = None

    kept: ClassVar[tuple[str, ...]] = ("prompt",)

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        """See `BodyRequest`; of several prompts the first."""
        self._refuse()
        refuse(self.best_of, "best_of", harmless=(0, 1, self.choices_each))
        prompt, token_ids = all_prompts(self.prompt, context_tokens_max)[0]
        tokens_max = self._tokens_max("max_tokens", COMPLETION_TOKENS_DEFAULT, int(not self.echo))
        logprobs = completion_logprobs(self.logprobs)
        shared = self.sampled(sampling)
        if self.echo and (logprobs is not None or token_ids is not None or tokens_max == 0):
            # The text of token ids only the engine knows.
            shared["prompt_logprobs"] = logprobs or 0
        return dict(
            prompt=prompt,
            token_ids=token_ids,
            max_tokens=tokens_max,
            logprobs=logprobs,
            **shared,
        )


def _stop_token_ids(raw: Raw) -> list[int]:
    param = "stop_token_ids"
    if is_absent(raw):
        return []
    check_length(raw, param, _STOP_TOKENS_BYTES_MAX)
    token_ids = decode_json(_tokens_decoder, raw, param)
    if len(token_ids) > STOP_TOKENS_MAX:
        raise RequestError(
            f"'{param}' holds {len(token_ids)} tokens; at most {STOP_TOKENS_MAX} are allowed",
            param=param,
        )
    return token_ids


def stop_strings(raw: Raw, param: str = "stop") -> list[str]:
    """The stop strings that `param` holds: one, or a list of them; `RequestError`."""
    if is_absent(raw):
        return []
    check_length(raw, param, STOP_BYTES_MAX)
    stop = decode_json(_stop_decoder, raw, param)
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > STOP_STRINGS_MAX:
        raise RequestError(
            f"'{param}' holds {len(strings)} strings; at most {STOP_STRINGS_MAX} are allowed",
            param=param,
        )
    if "" in strings:
        raise RequestError(
            f"'{param}' holds an empty string, which would stop at once", param=param
        )
    if (chars := sum(map(len, strings))) > STOP_CHARS_MAX:
        raise RequestError(
            f"'{param}' holds {chars} characters; at most {STOP_CHARS_MAX} are allowed", param=param
        )
    return strings


Prompt: TypeAlias = tuple[str | None, list[int] | None]
"""As text or as token ids: exactly one of the two is not None."""


def all_prompts(
    raw: Raw, context_tokens_max: int, param: str = "prompt", count_max: int = CHOICES_MAX
) -> list[Prompt]:
    """The prompts that `param` holds; raises `RequestError` if there are more than `count_max`."""
    raws = [raw]
    if _holds_prompts(raw):
        try:
            # Without a look at any that is too many.
            listed = _prompts_decoder(count_max).decode(raw)
        except UNDECODABLE as error:
            said = "is nested too deep"
            if isinstance(error, msgspec.ValidationError):
                said = f"holds more than {count_max} prompts; send several requests"
            raise RequestError(f"'{param}' {said}", param=param) from None
        raws = [each for each in msgspec.structs.astuple(listed) if each is not ABSENT]
    return [one_prompt(each, context_tokens_max, param) for each in raws]


def first_prompt(raw: Raw, context_tokens_max: int, param: str = "prompt") -> Prompt:
    """The first of the prompts that `param` holds, with no look at the others."""
    if _holds_prompts(raw):
        raw = decode_json(_first_decoder, raw, param).prompt
    return one_prompt(raw, context_tokens_max, param)


def one_prompt(raw: Raw, context_tokens_max: int, param: str = "prompt") -> Prompt:
    """The prompt that `param` holds; raises `RequestError` if it cannot fit the context."""
    kinds = _list_starts(raw)
    if kinds == '"':
        prompt = decode_json(_text_decoder, raw, param)
        if not prompt:
            raise RequestError("the prompt is empty", param=param)
        check_chars(len(prompt), context_tokens_max, param)
        return prompt, None
    if kinds == "[]":
        raise RequestError(f"'{param}' must not be empty", param=param)
    # Of a list of numbers this is how many there are; whatever else has commas is refused below.
    count = bytes(raw).count(b",") + 1
    if count > context_tokens_max:
        raise ContextLengthError.of(context_tokens_max, f"{count} tokens", param)
    try:
        return None, _tokens_decoder.decode(raw)
    except UNDECODABLE as error:
        raise RequestError(
            f"'{param}' must be a string, a list of token ids, or a list of these: {error}",
            param=param,
        ) from None


def _holds_prompts(raw: Raw) -> bool:
    return _list_starts(raw) in ('["', "[[")


def _list_starts(raw: Raw) -> str:
    """The first character of a JSON value, and of its first item if it is a list."""
    found = _LIST_START.match(raw)
    return "" if found is None else b"".join(found.groups(b"")).decode("latin-1")


_LIST_START = re.compile(rb"\s*([\[\"])(?:(?<=\[)\s*([\[\"\]]))?")
_stop_decoder: msgspec.json.Decoder[str | list[str]] = msgspec.json.Decoder(str | list[str])
_text_decoder = msgspec.json.Decoder(str)
_tokens_decoder = msgspec.json.Decoder(list[TokenId])


class _First(msgspec.Struct, array_like=True, frozen=True):
    prompt: Raw


_first_decoder = msgspec.json.Decoder(_First)


@cache
def _prompts_decoder(count_max: int) -> msgspec.json.Decoder[msgspec.Struct]:
    prompts: Any = msgspec.defstruct(
        "Prompts",
        [(f"prompt_{number}", Raw, ABSENT) for number in range(count_max)],
        array_like=True,
        forbid_unknown_fields=True,
        frozen=True,
    )
    return msgspec.json.Decoder(prompts)
