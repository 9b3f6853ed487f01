"""Every field that a client's body may have, by endpoint, and what becomes of it: one table.

A body is decoded by `BodyDecoder`, and whatever tells of fields reads the same table: refusals, a
model's entry in `/v1/models`, `/openapi.json` and `docs/fields.md`. An endpoint has a struct of what
it obeys (`requests.py`) and a mapping here, which a test holds to it. What this file does not do:
values (`shaping.py`), and what happens on a field that nobody knows (`http/chat.py`).

A body of known fields is decoded once. Only one that has others is looked at again, and then what
can be long stays undecoded: a body of four megabytes may hold half a million names.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec
from msgspec import Raw
from typing_extensions import Buffer

from ..undecodable import UNDECODABLE
from .generate import ASKING, Feature
from .shaping import ABSENT, NOTHING, decode_json, refuse

UNKNOWN_MAX: Final = 8
"""So many names that nobody knows are told of one request."""
_NAME_CHARS_MAX: Final = 64
_UNKNOWN_BYTES_MAX: Final = 1 << 16
"""Of a body, beside the values of known fields: in longer ones only the first unknown is found."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\-]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)

OPENAI: Final = "OpenAI"
VLLM: Final = "vLLM"
SGLANG: Final = "SGLang"
LLAMACPP: Final = "llama.cpp"
OLLAMA: Final = "Ollama"
ANTHROPIC: Final = "Anthropic"


class Use(enum.StrEnum):
    """What becomes of a field."""

    OBEYED = "obeyed"
    """It does what it says, where the engine has its feature; else it is refused by name."""
    REFUSED = "refused"
    """It would change the answer, and nothing here does it: a 400 that names it, unless its value is
    one of the harmless ones."""
    LABEL = "label"
    """It cannot change the answer: whatever it says, it passes."""


class Message(msgspec.Struct):
    """One turn of a chat."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of it; parts that are no text, only of models that understand them."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


@attrs.frozen
class Field:
    """One field of one endpoint."""

    use: Use
    about: str = ""
    """What it does, or what to use in its place."""
    of: str = OPENAI
    """Whose it is."""
    sets: tuple[str, ...] = ()
    """The fields of `GenerateRequest` that it sets, where they are called otherwise."""
    type: Any = Any
    """Of its value, where the endpoint's struct keeps the bytes for later."""
    harmless: tuple[Any, ...] = NOTHING
    """Values with which one that is refused changes nothing; null always does."""
    is_form: bool = False
    """It holds the answer to a form, which begins anew with it: see `FORMS`."""

    def features(self, name: str) -> list[Feature]:
        """Of which an engine needs one at least to obey it; none for what every engine does."""
        sets = self.sets or (name,)
        return list(dict.fromkeys(feature for field, _, feature, _ in ASKING if field in sets))


def _obeyed(about: str, of: str = OPENAI, **more: Any) -> Field:
    return Field(Use.OBEYED, about, of, **more)


def _form(about: str, of: str, *sets: str, type: Any = str) -> Field:  # noqa: A002 -- as `Field` has it
    return Field(Use.OBEYED, about, of, sets, type, is_form=True)


def _refused(about: str = "", of: str = OPENAI, harmless: tuple[Any, ...] = NOTHING) -> Field:
    return Field(Use.REFUSED, about, of, harmless=harmless)


def _labels(of: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(Use.LABEL, of=of))


_ONE: Final = (1, 1.0)
_TRUE: Final = (True,)

STEERING: Final[Mapping[str, Field]] = {
    name: _refused("only the deployment directs an engine's transfers", of, ())
    for of, names in (
        (VLLM, ("kv_transfer_params", "ec_transfer_params")),
        (SGLANG, ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")),
        (SGLANG, ("disagg_prefill_dp_rank",)),
        ("TensorRT-LLM", ("disaggregated_params",)),
    )
    for name in names
}
"""Fields by which a request directs an engine to fetch or send KV. The address in them is dialed.

They are refused on all endpoints, also for models that pass requests through: a client that names
an address would otherwise reach whatever the engine can reach, and half a set of them ends a vLLM.
"""

# fmt: off
_SHARED: Final[dict[str, Field]] = {
    "model": _obeyed("A name of `/v1/models`; the oldest model if it is left out."),
    "max_tokens": _obeyed("At least 1; -1 for no bound but the model's context."),
    "temperature": _obeyed("From 0, which is greedy, to 2."),
    "top_p": _obeyed("Above 0, at most 1."),
    "top_k": _obeyed("-1 and 0 are all tokens.", VLLM),
    "min_p": _obeyed("From 0 to 1.", VLLM),
    "seed": _obeyed(
        "The same seed gives the same tokens: of `exact` always; of `llamacpp` with `cache_prompt`"
        " false, while no other request is computed beside it, since its sums differ in the last"
        " digit by how many tokens one step computes."
    ),
    "presence_penalty": _obeyed("From -2 to 2, of the answer so far."),
    "frequency_penalty": _obeyed("From -2 to 2, of the answer so far."),
    "repetition_penalty": _obeyed("Above 0, at most 2, of the prompt too.", VLLM),
    "logit_bias": _obeyed("At most 1024 tokens, from -100 to 100.", type=dict[str, float]),
    "stop": _obeyed("At most 32 strings, of 4096 characters together.", type=str | list[str]),
    "stop_token_ids": _obeyed("At most 128 tokens that end the answer.", VLLM, type=list[int]),
    "ignore_eos": _obeyed("The model's end tokens do not end the answer.", VLLM),
    "min_tokens": _obeyed("No end token before so many tokens.", VLLM),
    "cache_prompt": _obeyed(
        "false: the prompt is computed whole, and not from behind what it has in common with earlier"
        " ones. See `seed`.", LLAMACPP),
    "return_token_ids": _obeyed("The answer tells the ids of its tokens, and of the prompt's.", VLLM),
    "stream": _obeyed("Whether the answer comes as events."),
    "stream_options": _obeyed("`include_usage`: the stream ends with the usage."),
    "n": _obeyed("So many choices, at most 128 for all prompts."),
    "response_format": _form(
        "`text`, `json_object` or `json_schema`; a schema of at most 64 KiB.", OPENAI, "json_schema",
        type=dict[str, Any],
    ),
    "structured_outputs": _form(
        "One of `json`, `regex`, `choice`, `grammar` and `json_object`.", VLLM,
        "json_schema", "regex", "choices", "grammar", type=dict[str, Any],
    ),
    "guided_json": _form("As `structured_outputs.json`.", VLLM, "json_schema", type=str | dict[str, Any]),
    "guided_regex": _form("As `structured_outputs.regex`.", VLLM, "regex"),
    "guided_choice": _form("As `structured_outputs.choice`.", VLLM, "choices", type=list[str]),
    "guided_grammar": _form("As `structured_outputs.grammar`.", VLLM, "grammar"),
    "regex": _form("As `structured_outputs.regex`.", SGLANG, "regex"),
    "ebnf": _form("As `structured_outputs.grammar`.", SGLANG, "grammar"),
    "json_schema": _form(
        "As `structured_outputs.json`.", f"{SGLANG}, {LLAMACPP}", "json_schema",
        type=str | dict[str, Any],
    ),
    "grammar": _form("As `structured_outputs.grammar`.", LLAMACPP, "grammar"),
    "prompt_logprobs": _refused("use echo and logprobs, of /v1/completions", VLLM, ()),
    "structural_tag": _refused("use response_format", VLLM),
    "guided_whitespace_pattern": _refused("", VLLM),
    "logits_processors": _refused("", VLLM),
    "custom_logit_processor": _refused("", SGLANG),
    "bad_words": _refused("use logit_bias", VLLM),
    "allowed_token_ids": _refused("use structured_outputs", VLLM),
    "use_beam_search": _refused("", VLLM),
    "length_penalty": _refused("", VLLM, _ONE),
    "include_stop_str_in_output": _refused("", VLLM),
    "skip_special_tokens": _refused("", VLLM, _TRUE),
    "spaces_between_special_tokens": _refused("", VLLM, _TRUE),
    "truncate_prompt_tokens": _refused("shorten the prompt", VLLM, (-1,)),
    "thinking_token_budget": _refused("use max_tokens", VLLM),
    "cache_salt": _refused("give each client a key of its own", VLLM),
    "vllm_xargs": _refused("", VLLM),
    "lora_path": _refused("name the model", SGLANG),
    "session_params": _refused("", SGLANG),
    "no_stop_trim": _refused("", SGLANG),
    "return_hidden_states": _refused("", SGLANG),
    "n_predict": _refused("use max_tokens", LLAMACPP, (-1,)),
    "repeat_penalty": _refused("use repetition_penalty", LLAMACPP, _ONE),
    "typical_p": _refused("use top_p", LLAMACPP, _ONE),
    "mirostat": _refused("use top_p", LLAMACPP),
    "xtc_probability": _refused("use min_p", LLAMACPP),
    "dry_multiplier": _refused("use repetition_penalty", LLAMACPP),
    "dynatemp_range": _refused("use temperature", LLAMACPP),
    "lora": _refused("name the model", LLAMACPP),
    "options": _refused("send what it holds as fields of its own", OLLAMA),
    **STEERING,
    **_labels(OPENAI, "user", "store", "metadata", "service_tier", "safety_identifier",
              "prompt_cache_key", "prompt_cache_retention"),
    **_labels(VLLM, "priority", "request_id", "guided_decoding_backend", "include_reasoning"),
    **_labels(SGLANG, "rid", "separate_reasoning", "stream_reasoning"),
    # What belongs to samplers that are refused above does nothing without them.
    **_labels(LLAMACPP, "id_slot", "timings_per_token", "mirostat_tau",
              "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length",
              "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    **_labels(OLLAMA, "keep_alive"),
}

CHAT_FIELDS: Final[Mapping[str, Field]] = {
    "messages": _obeyed("Turns of text.", type=list[Message]),
    **_SHARED,
    "max_completion_tokens": _obeyed("As `max_tokens`, which it goes before.", sets=("max_tokens",)),
    "logprobs": _obeyed("Of the model itself, before temperature, biases, penalties and grammar.", type=bool),
    "top_logprobs": _obeyed("At most 20 alternatives.", sets=("logprobs",), type=int),
    "tools": _obeyed("At most 128 functions.", type=list[dict[str, Any]]),
    "tool_choice": _obeyed("`none`, `auto`, `required`, or a function.", sets=("tools",), type=str | dict[str, Any]),
    "parallel_tool_calls": _obeyed("Whether an answer may hold several calls.", sets=("tools",)),
    "chat_template_kwargs": _obeyed("What the chat template is given besides.", VLLM, type=dict[str, Any]),
    "continue_final_message": _obeyed("The answer goes on with the last turn, an assistant's.", VLLM),
    "add_generation_prompt": _obeyed(
        "True, or false with `continue_final_message`.", VLLM, sets=("continue_final_message",)
    ),
    "functions": _refused("use tools"),
    "function_call": _refused("use tool_choice", harmless=("none", "auto", *NOTHING)),
    "modalities": _refused("", harmless=(["text"], [])),
    "audio": _refused(),
    "web_search_options": _refused("", harmless=()),
    "chat_template": _refused("the model's own is used", VLLM),
    "documents": _refused("put them into messages", VLLM),
    "mm_processor_kwargs": _refused("", VLLM),
    "add_special_tokens": _refused("the chat template writes them", VLLM),
    "echo": _refused("", VLLM),
    **_labels(OPENAI, "verbosity", "reasoning_effort", "prediction"),
}

SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
)
"""What a response takes of what a chat does, by the same names."""

COMPLETION_FIELDS: Final[Mapping[str, Field]] = {
    "prompt": _obeyed("Text, or token ids, or a list of these.", type=str | list[str | int | list[int]]),
    **_SHARED,
    "logprobs": _obeyed("So many alternatives, at most 20, for each token.", type=int),
    "echo": _obeyed(
        "The text begins with the prompt; `max_tokens` may be 0. With `logprobs` the prompt's are told, too.",
        sets=("prompt_logprobs",),
    ),
    "best_of": _obeyed("1, or as `n`."),
    "suffix": _refused(),
    "add_special_tokens": _refused("", VLLM, _TRUE),
}

RESPONSES_FIELDS: Final[Mapping[str, Field]] = {
    "model": _SHARED["model"],
    "input": _obeyed("Text, or items.", type=str | list[dict[str, Any]]),
    "instructions": _obeyed("The first turn, of the system."),
    "max_output_tokens": _obeyed("At least 1.", sets=("max_tokens",)),
    **{name: _SHARED[name] for name in SAMPLED},
    "stream": _SHARED["stream"],
    "text": _obeyed("`format`: `text`, `json_object` or `json_schema`.", sets=("json_schema",), type=dict[str, Any]),
    "tools": _obeyed("At most 128 functions, in the flat form.", type=list[dict[str, Any]]),
    "tool_choice": CHAT_FIELDS["tool_choice"],
    "parallel_tool_calls": CHAT_FIELDS["parallel_tool_calls"],
    "include": _obeyed("`message.output_text.logprobs`.", sets=("logprobs",), type=list[str]),
    "top_logprobs": CHAT_FIELDS["top_logprobs"],
    "metadata": _obeyed("Comes back in the answer.", type=dict[str, str]),
    "previous_response_id": _refused("nothing is stored: send the earlier items in input"),
    "conversation": _refused("nothing is stored: send the earlier items in input"),
    "prompt": _refused("nothing is stored: send instructions and input"),
    "background": _refused("nothing is stored"),
    "context_management": _refused("send fewer items in input"),
    "messages": _refused("use input"),
    "max_tokens": _refused("use max_output_tokens"),
    "max_completion_tokens": _refused("use max_output_tokens"),
    "response_format": _refused("use text.format"),
    "logprobs": _refused("use include"),
    "n": _refused("send several requests", harmless=_ONE),
    **{name: _refused("use text.format", field.of) for name, field in _SHARED.items()
       if field.is_form and name != "response_format"},
    **STEERING,
    **_labels(OPENAI, "store", "reasoning", "truncation", "max_tool_calls", "stream_options", "user",
              "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
              "prompt_cache_options"),
}

COUNT_FIELDS: Final[Mapping[str, Field]] = {
    "model": _SHARED["model"],
    "messages": _obeyed("Turns of text, of tools' uses and of their results.", ANTHROPIC, type=list[dict[str, Any]]),
    "system": _obeyed("The first turn.", ANTHROPIC, type=str | list[dict[str, Any]]),
    "tools": _obeyed("At most 128 tools of your own.", ANTHROPIC, type=list[dict[str, Any]]),
    "tool_choice": _obeyed("`auto`, `any`, `tool` or `none`.", ANTHROPIC, sets=("tools",), type=dict[str, Any]),
    "mcp_servers": _refused("use tools", ANTHROPIC),
    "container": _refused("", ANTHROPIC),
    **STEERING,
    **_labels(ANTHROPIC, "cache_control", "thinking", "context_management"),
}

MESSAGES_FIELDS: Final[Mapping[str, Field]] = {
    **COUNT_FIELDS,
    "max_tokens": _obeyed("At least 1.", ANTHROPIC),
    "temperature": _obeyed("From 0, which is greedy, to 2.", ANTHROPIC),
    "top_p": _obeyed("Above 0, at most 1.", ANTHROPIC),
    "top_k": _obeyed("0 is all tokens.", ANTHROPIC),
    "stop_sequences": _obeyed("At most 32 strings, of 4096 characters together.", ANTHROPIC, sets=("stop",), type=list[str]),
    "stream": _obeyed("Whether the answer comes as events.", ANTHROPIC),
    "output_config": _obeyed("`format`: `json_schema`.", ANTHROPIC, sets=("json_schema",), type=dict[str, Any]),
    "output_format": _obeyed("As `output_config.format`.", ANTHROPIC, sets=("json_schema",), type=dict[str, Any]),
    "stop": _refused("use stop_sequences"),
    "response_format": _refused("use output_config"),
    "max_completion_tokens": _refused("use max_tokens"),
    **_labels(ANTHROPIC, "metadata", "service_tier", "inference_geo", "speed", "diagnostics"),
}

EMBEDDINGS_FIELDS: Final[Mapping[str, Field]] = {
    "model": _SHARED["model"],
    "input": _obeyed("Text, token ids, or a list of `http.embedding_inputs_max` of these at most.", type=str | list[str | int | list[int]]),
    "encoding_format": _obeyed("`float` or `base64`."),
    "dimensions": _refused("all are given"),
    "truncate_prompt_tokens": _SHARED["truncate_prompt_tokens"],
    "add_special_tokens": COMPLETION_FIELDS["add_special_tokens"],
    **STEERING,
    **_labels(OPENAI, "user"),
}

TOKENIZE_FIELDS: Final[Mapping[str, Field]] = {
    "model": _SHARED["model"],
    "prompt": _obeyed("Text.", VLLM, type=str | list[int]),
    "messages": _obeyed("In its place, the turns of a chat.", VLLM, type=list[Message]),
    "tools": _obeyed("Of the chat.", VLLM, type=list[dict[str, Any]]),
    "add_special_tokens": COMPLETION_FIELDS["add_special_tokens"],
    "add_generation_prompt": _refused("", VLLM, _TRUE),
    "continue_final_message": _refused("", VLLM),
    "return_token_strs": _refused("ask /detokenize", VLLM),
    "chat_template": CHAT_FIELDS["chat_template"],
    "chat_template_kwargs": _refused("", VLLM),
    **STEERING,
}

DETOKENIZE_FIELDS: Final[Mapping[str, Field]] = {
    "model": _SHARED["model"],
    "tokens": _obeyed("Ids.", VLLM, type=list[int]),
    **STEERING,
}

ENDPOINTS: Final[Mapping[str, Mapping[str, Field]]] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": COUNT_FIELDS,
    "/v1/embeddings": EMBEDDINGS_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}
"""The fields of each endpoint, by its path. To models that pass requests through all but `STEERING` go
unread."""
# fmt: on

FORMS: Final = tuple(name for name, field in _SHARED.items() if field.is_form)
"""What holds an answer to a form, in order; one of them at most does in a request."""


@lru_cache(maxsize=64)
def supported(endpoints: tuple[str, ...], features: frozenset[str]) -> tuple[str, ...]:
    """The fields that an engine with `features` obeys on any of those endpoints, sorted."""
    found = {
        name
        for endpoint in endpoints
        for name, field in ENDPOINTS.get(endpoint, {}).items()
        if field.use is Use.OBEYED
        if not (asked := field.features(name)) or any(each in features for each in asked)
    }
    return tuple(sorted(found))


@attrs.frozen
class UnknownFields:
    """Fields of one request that nobody knows; their names can stand in a header and in a log."""

    names: list[str]
    """The first `UNKNOWN_MAX` of them, shortened."""
    sentence: str
    """Such as `min_tokn (did you mean min_tokens?), and 2 more`."""


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class BodyDecoder(Generic[_Struct]):
    """Makes a `kind` of a body, whose `fields` are its endpoint's.

    `kind` has a member for each field that is obeyed, and ignores what it does not know.
    """

    def __init__(self, kind: type[_Struct], fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._obeyed = tuple(n for n, field in fields.items() if field.use is Use.OBEYED)
        self._lenient = msgspec.json.Decoder(kind)
        labels = [name for name, field in fields.items() if field.use is Use.LABEL]
        self._strict = msgspec.json.Decoder(_strict(kind, labels))
        every = msgspec.defstruct("Fields", [(name, Raw, ABSENT) for name in fields])
        self._any = msgspec.json.Decoder(every)
        self._every = msgspec.json.Decoder(_strict(every))

    def decode(self, body: Buffer, tell: Callable[[UnknownFields], None] | None = None) -> _Struct:
        """The request in `body`; `tell` is called if it has fields that nobody knows.

        Raises `RequestError` naming the field that is wrong or refused, and what `tell` raises.
        """
        try:
            return self._strict.decode(body)
        except UNDECODABLE as error:
            is_unknown = _UNKNOWN.match(str(error))
        # Also what is no JSON: this says so.
        request = decode_json(self._lenient, body)
        unknown = self._look(body) if is_unknown else None
        if unknown is not None and tell is not None:
            tell(unknown)
        return request

    def _look(self, body: Buffer) -> UnknownFields | None:
        """Refuse what is refused; then what is left that nobody knows, if anything is."""
        first: str | None = None
        try:
            values = self._every.decode(body)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN.match(str(error))
            first = unknown and unknown[1]
            values = self._any.decode(body)
        size = 0
        for name, field in self._fields.items():
            value = getattr(values, name)
            size += len(value)
            if field.use is Use.REFUSED:
                refuse(value, name, harmless=field.harmless, instead=field.about)
        if first is None:
            return None
        names = [first]
        if memoryview(body).nbytes - size <= _UNKNOWN_BYTES_MAX:
            members = _members_decoder.decode(body)
            names = [name for name in members if name not in self._fields]
        told = [_UNSAFE.sub("?", name[:_NAME_CHARS_MAX]) or "?" for name in names[:UNKNOWN_MAX]]
        sentences = [_with_hint(name, self._obeyed) for name in told]
        if len(names) > UNKNOWN_MAX:
            sentences.append(f"and {len(names) - UNKNOWN_MAX} more")
        return UnknownFields(told, ", ".join(sentences))


_members_decoder = msgspec.json.Decoder(dict[str, Raw])


def _strict(kind: type[_Struct], labels: Iterable[str] = ()) -> type[_Struct]:
    """The same, of bodies that have nothing besides but `labels`."""
    made: Any = msgspec.defstruct(
        kind.__name__,
        [(name, Raw, ABSENT) for name in labels],
        bases=(kind,),
        frozen=kind.__struct_config__.frozen,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    return made  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _with_hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{name} (did you mean {near[0]}?)" if near else name
