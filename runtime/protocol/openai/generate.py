"""What the frontend asks a worker to generate, and what comes back: the payloads of one model.

**A request is checked once, where it enters.** The types here say what each parameter may be. A client's
JSON is decoded into them by the frontend (`requests.py`), a member's bytes by the worker's endpoint
(`bounded_request_type`), whether a frontend, an RPC client or the simulator sent them; both refuse
with the same words. That a request has exactly one prompt it checks itself when it is made. Engines
check only what they alone know: their features, their context, their vocabulary.

Encoded as MessagePack by the runtime. `Delta` is an array on the wire, because there is one per
token.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterator
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec

from ...errors import RequestError

ALIASES_MAX: Final = 32
"""Of one worker for one model."""
STOP_STRINGS_MAX: Final = 32
STOP_CHARS_MAX: Final = 4096
"""Of all stop strings of a request; the text that can be held back is as long."""
TOKEN_CHARS_MAX: Final = 256
"""No token stands for more characters: the longest of known vocabularies are 128 spaces. So a text
of more characters than a context has room for is refused before anybody makes tokens of it."""
SCHEMA_CHARS_MAX: Final = 1 << 16
"""Of one JSON schema: what becomes of it is computed between two steps."""
TOOLS_CHARS_MAX: Final = 1 << 18
"""Of the JSON of all tools of a request."""
LOGIT_BIASES_MAX: Final = 1024
STOP_TOKENS_MAX: Final = 128
CHOICES_MAX: Final = 1024
"""Of the texts that a request lists as its only answers."""
TENANT_CHARS_MAX: Final = 64
TOOL_NAMED: Final = "function:"
"""What `GenerateRequest.tool_choice` begins with where the client names the one to call."""
_UTF8_BYTES_MAX: Final = 4
_LOGIT_BIAS_BYTES: Final = 14
_SHAPE_BYTES_MAX: Final = (
    2 * SCHEMA_CHARS_MAX + TOOLS_CHARS_MAX
) * _UTF8_BYTES_MAX + LOGIT_BIASES_MAX * _LOGIT_BIAS_BYTES
"""What form, template arguments, tools and biases of an encoded `GenerateRequest` have at most."""
_TOKEN_ID_BYTES_MAX: Final = 5
_OTHER_FIELDS_BYTES: Final = 1 << 16

# What no answer has more of; a worker that tells other numbers breaks the protocol.
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# What a parameter may be, wherever a request enters. A NaN is none of them.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Role = Literal["system", "user", "assistant", "tool"]
Shape = Annotated[str, msgspec.Meta(max_length=SCHEMA_CHARS_MAX)]
Choice = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_CHARS_MAX)]

# Of an alias: what a client may ask for, and a line of a table shows.
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class FinishReason(enum.StrEnum):
    """Why generation ended; the last delta of an answer carries one, also of one that was stopped.

    Whether an answer that was stopped is the whole, decides who stopped it (`Context.cut_by`).
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """What a client is told for a `STOP` behind calls of its tools."""


class Feature(enum.StrEnum):
    """What not every engine can do with a request; `EngineInfo.features` and model cards list it."""

    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    TOP_K = "top_k"
    MIN_P = "min_p"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"
    """A regular expression, a list of texts or a grammar that the whole answer is of."""
    TOOLS = "tools"
    END_TOKENS = "end_tokens"
    """To say which tokens end an answer, and how many come before any may."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    CHAT_TEMPLATE = "chat_template"
    """To say how the model's template makes a prompt of a chat."""
    TOKENIZE = "tokenize"
    EMBEDDINGS = "embeddings"


class Task(enum.StrEnum):
    """What is asked of an engine."""

    GENERATE = "generate"
    TOKENIZE = "tokenize"
    """The prompt's tokens: in the one delta of the answer, `prompt_token_ids`."""
    DETOKENIZE = "detokenize"
    """The text of `token_ids`: in the one delta of the answer."""
    EMBED = "embed"
    """The prompt's embedding: in the one delta of the answer, `raw`, float32 in little-endian order."""


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Role
    content: str
    tool_calls: str = ""
    """JSON of what an assistant called, as OpenAI writes it."""
    tool_call_id: str = ""
    """Which call a tool answers."""
    name: str = ""
    """Of the tool that answers."""


class PassedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is read of a body that is passed through: whom it is for, and the form of the answer."""

    model: str | None = None
    stream: bool | None = None
    choices: int = 1
    """How many answers a chat asks for; 0 if only the upstream can tell."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `messages`, `prompt` and `token_ids` is set, and not empty: else `RequestError`.

    `max_tokens` None means up to the model's context length. `temperature` 0 is greedy; `seed`
    None draws one. `stop` holds at most `STOP_STRINGS_MAX` strings; none of them appears in the text.

    `delivered_ids` are the tokens of this answer that the client has already, made by another
    engine of this model: it goes on behind them as if it had never stopped. Only an engine that
    says `can_resume` may be given any. All other fields are those of the first request, the seed
    that was drawn included; the deltas tell of new tokens alone.

    What `features_of` tells needs a feature of the engine. `logprobs` asks for those of each token
    and of so many alternatives, `prompt_logprobs` for the same of the prompt's tokens, all of which
    are computed then. A penalty looks at the answer so far, the repetition penalty at the
    prompt too, and biases are added to logits. The answer is JSON by `json_schema`, a schema's own JSON,
    or one of `choices`, or of the language of `regex` or of `grammar` (Lark's notation, llguidance's
    dialect), of which one at most is given; or it calls `tools`, OpenAI's list as JSON. `tool_choice`
    is empty (as `auto`), `auto`, `none`, `required`, or `TOOL_NAMED` and a function's name.

    An answer ends at the model's end tokens, unless `ignore_eos`, and at `stop_token_ids`, neither
    of which comes before `min_tokens` tokens; stop strings end it wherever they come. A
    `max_tokens` of 0 asks for the prompt's log probabilities alone.

    For a model that passes requests through, `body` is the client's own JSON and `path` where it
    was sent, such as `/v1/chat/completions`; `passed` is what was read of the body, so that it is
    read once. Nothing else but `model` is set then, and `delivered_text`, of `delivered_tokens`,
    takes the place of `delivered_ids`. `opening` is the first event that the client has, if nothing
    else: another upstream goes on with its id.
    """

    model: str
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: Natural | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    seed: int | None = None
    stop: Annotated[list[StopString], msgspec.Meta(max_length=STOP_STRINGS_MAX)] = []
    delivered_ids: list[int] = []
    top_k: TopK = 0
    """0 for all tokens."""
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[dict[int, Bias], msgspec.Meta(max_length=LOGIT_BIASES_MAX)] = {}
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    ignore_eos: bool = False
    min_tokens: Natural = 0
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=STOP_TOKENS_MAX)] = []
    json_schema: Shape = ""
    regex: Shape = ""
    choices: Annotated[list[Choice], msgspec.Meta(max_length=CHOICES_MAX)] = []
    grammar: Shape = ""
    chat_template_kwargs: Shape = ""
    """JSON of what the chat template is given besides, an object."""
    continue_final_message: bool = False
    """The prompt ends with the last turn of the chat, an assistant's, as if it was not complete."""
    return_token_ids: bool = False
    """The first delta tells the prompt's tokens (`Delta.prompt_token_ids`)."""
    task: Task = Task.GENERATE
    tools: Annotated[str, msgspec.Meta(max_length=TOOLS_CHARS_MAX)] = ""
    tool_choice: str = ""
    parallel_tool_calls: bool = True
    body: bytes = b""
    path: str = ""
    passed: PassedRequest | None = None
    delivered_text: str = ""
    delivered_tokens: int = 0
    opening: bytes = b""
    tenant: Annotated[str, msgspec.Meta(max_length=TENANT_CHARS_MAX)] = ""
    """Whose request it is (`http/admission/keys.py`): nothing that is computed for one may show to
    another. Empty where clients have no keys, and all are one."""
    cache_prompt: bool = True
    """Whether it may begin behind what was computed for others; false: its prompt is computed whole."""

    def __post_init__(self) -> None:
        if self.body:
            return
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "'max_tokens' must be >= 1 where no log probabilities of the prompt are asked for",
                param="max_tokens",
            )
        if self.stop and sum(map(len, self.stop)) > STOP_CHARS_MAX:
            raise RequestError(
                f"the strings of 'stop' may have {STOP_CHARS_MAX} characters together", param="stop"
            )
        given = [x for x in (self.messages, self.prompt, self.token_ids) if x is not None]
        if len(given) != 1:
            raise RequestError(
                f"exactly one of messages, prompt and token_ids must be given, not {len(given)}",
                param="messages",
            )
        if not given[0]:
            if self.messages is not None:
                raise RequestError("messages is empty; at least one is needed", param="messages")
            raise RequestError("the prompt is empty", param="prompt")

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may be calls of its tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def calls_max(self) -> float:
        """How many calls of its tools the answer may hold."""
        return self.calls_tools and (math.inf if self.parallel_tool_calls else 1)

    @property
    def turns(self) -> list[ChatMessage]:
        """The conversation; a prompt is one turn of the user.

        Raises `RequestError` for a prompt of token ids.
        """
        if self.messages is not None:
            return self.messages
        if self.prompt is None:
            raise RequestError(
                ONLY_TEXT,
                param="token_ids",
            )
        return [ChatMessage("user", self.prompt)]

    @property
    def text(self) -> str:
        """What to answer: what the user said last, or the prompt.

        Raises `RequestError` for a prompt of token ids.
        """
        turns = self.turns
        asked = (turn.content for turn in reversed(turns) if turn.role == "user")
        return next(asked, turns[-1].content if turns else "")


ONLY_TEXT: Final = "this model has no vocabulary; send messages or a prompt, no token ids"
ASKING: Final[tuple[tuple[str, Any, Feature, str], ...]] = (
    ("logprobs", None, Feature.LOGPROBS, "logprobs"),
    ("presence_penalty", 0, Feature.PENALTIES, "presence_penalty"),
    ("frequency_penalty", 0, Feature.PENALTIES, "frequency_penalty"),
    ("repetition_penalty", 1, Feature.PENALTIES, "repetition_penalty"),
    ("logit_bias", {}, Feature.LOGIT_BIAS, "logit_bias"),
    ("top_k", 0, Feature.TOP_K, "top_k"),
    ("min_p", 0, Feature.MIN_P, "min_p"),
    ("json_schema", "", Feature.JSON_SCHEMA, "response_format"),
    ("regex", "", Feature.GRAMMAR, "structured_outputs"),
    ("choices", [], Feature.GRAMMAR, "structured_outputs"),
    ("grammar", "", Feature.GRAMMAR, "structured_outputs"),
    ("prompt_logprobs", None, Feature.PROMPT_LOGPROBS, "echo"),
    ("ignore_eos", False, Feature.END_TOKENS, "ignore_eos"),
    ("min_tokens", 0, Feature.END_TOKENS, "min_tokens"),
    ("stop_token_ids", [], Feature.END_TOKENS, "stop_token_ids"),
    ("chat_template_kwargs", "", Feature.CHAT_TEMPLATE, "chat_template_kwargs"),
    ("continue_final_message", False, Feature.CHAT_TEMPLATE, "continue_final_message"),
    ("return_token_ids", False, Feature.TOKENIZE, "return_token_ids"),
    ("tools", "", Feature.TOOLS, "tools"),
)
"""Fields that ask for a feature when they are not as here, and what a client calls them."""
_TASKS: Final = {
    Task.TOKENIZE: Feature.TOKENIZE,
    Task.DETOKENIZE: Feature.TOKENIZE,
    Task.EMBED: Feature.EMBEDDINGS,
}
_SHAPING: Final = frozenset(
    {
        Feature.LOGPROBS,
        Feature.PENALTIES,
        Feature.LOGIT_BIAS,
        Feature.JSON_SCHEMA,
        Feature.GRAMMAR,
        Feature.PROMPT_LOGPROBS,
    }
)


def _fields(rows: tuple[tuple[str, Any, Feature, str], ...]) -> tuple[Callable[[Any], Any], Any]:
    """What gets all these fields of a request at once, and what it gets where none is set."""
    return attrgetter(*(row[0] for row in rows)), tuple(row[1] for row in rows)


# Most requests ask for none: they are compared once, and no row is looked at.
_asked, _UNASKED = _fields(ASKING)
_shaped, _UNSHAPED = _fields(tuple(row for row in ASKING if row[2] in _SHAPING))


def features_of(request: GenerateRequest) -> Iterator[tuple[Feature, str]]:
    """What an engine must be able to do for `request`, each with the parameter that asks for it."""
    asked = _asked(request)
    if asked != _UNASKED:
        for value, (_, unset, feature, param) in zip(asked, ASKING, strict=True):
            if value != unset:
                yield feature, param
    if request.task is not Task.GENERATE:
        yield _TASKS[request.task], "task"
    for index, message in enumerate(request.messages or ()):
        if message.tool_calls:
            yield Feature.TOOLS, f"messages[{index}].tool_calls"
        elif message.role == "tool":
            yield Feature.TOOLS, f"messages[{index}].role"


def check_features(
    request: GenerateRequest, features: Container[str], called: Callable[[str], str] = str
) -> None:
    """Raise `RequestError` if `request` asks for what is not among `features`: see `Feature`.

    `called` tells by what name its client asked for the parameter that is refused.
    """
    for feature, param in features_of(request):
        if feature not in features:
            name = called(param)
            raise RequestError(f"'{name}' is not supported by this model", param=name)


def is_shaped(request: GenerateRequest) -> bool:
    """Whether a token is chosen by more than the sampling and what may end the answer, or told of.

    Tools that the model may call or not are a matter of the prompt.
    """
    if request.tools and request.tool_choice not in ("", "none", "auto"):
        return True
    shaped: bool = _shaped(request) != _UNSHAPED
    return shaped


def bounded_request_type(context_tokens_max: int) -> type[GenerateRequest]:
    """`GenerateRequest` for a model of that context: one that decodes cannot be much too long.

    Lists are measured before they are made, so that a request of a million token ids costs its
    bytes and no more.
    """
    count = msgspec.Meta(max_length=context_tokens_max)
    text: Any = Annotated[str, msgspec.Meta(max_length=context_tokens_max * TOKEN_CHARS_MAX)]
    tokens: Any = Annotated[list[int], count]
    turns: Any = Annotated[list[ChatMessage], count]
    bounded: Any = msgspec.defstruct(
        "BoundedRequest",
        [
            ("messages", turns | None, None),
            ("prompt", text | None, None),
            ("token_ids", tokens | None, None),
            ("delivered_ids", tokens, []),
        ],
        bases=(GenerateRequest,),
        frozen=True,
        kw_only=True,
        omit_defaults=True,
    )
    made: type[GenerateRequest] = bounded
    return made


def payload_bytes_max_for(context_tokens_max: int) -> int:
    """How long an encoded `GenerateRequest` that such a model can take is at most."""
    text_bytes = (context_tokens_max * TOKEN_CHARS_MAX + STOP_CHARS_MAX) * _UTF8_BYTES_MAX
    tokens_bytes = context_tokens_max * _TOKEN_ID_BYTES_MAX
    return text_bytes + tokens_bytes + _SHAPE_BYTES_MAX + _OTHER_FIELDS_BYTES


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How likely the model found one token of an answer, by its bytes: natural logarithms.

    `top` are the likeliest at its place, likeliest first, the token among them if it is one.
    """

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = []


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step added to one answer.

    `token_ids` are all tokens generated since the last delta, also those whose text is held back
    (an incomplete character, the possible start of a stop string), so their lengths add up to the
    completion tokens. `prompt_tokens` is set on the first delta only. `logprobs` are those of
    `token_ids`, where they were asked for, but not of one that ends the answer and has no text.

    Where requests are passed through there are no token ids. `raw` is what the client gets: whole
    server-sent events, or a piece of a body, which `status` says is a refusal where it is not 0.
    `output_tokens` are then those that came with it: one an event, until the upstream tells better.
    """

    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    prompt_tokens: TokenCount = 0
    logprobs: list[TokenLogprob] = []
    output_tokens: TokenCount = 0
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    raw: bytes = b""
    cached_tokens: TokenCount = 0
    """Of `prompt_tokens`, those that were not computed for this request."""
    prompt_token_ids: list[int] = []
    """The prompt's tokens, on the first delta, where they were asked for."""
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt's tokens, on the first delta, where they were asked for; of the first of them,
    which nothing comes before, its logprob is 0 and means nothing."""
    stop_string: str = ""
    """Of the request's, the one that ended the answer, on the last delta."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's requests have where they say nothing; None: as `GenerateRequest` has it."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_tokens: Positive | None = None
    """Of chats and responses; a completion has OpenAI's own default."""


UNSAID: Final = SamplingDefaults()


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker publishes under `models/…` so that frontends offer the model."""

    name: str
    endpoint: str
    """`namespace/component/endpoint` that takes a `GenerateRequest` and streams `Delta`s."""
    chat: bool = True
    completions: bool = True
    context_tokens_max: int = 0
    engine: str = ""
    fingerprint: str = ""
    """Of what computes the answers: workers of one model whose fingerprints differ disagree."""
    block_tokens: int = 0
    """Of one KV block; 0 where the engine keeps none."""
    tokenizer: str = ""
    """How a frontend can make the prompt's tokens itself (`engines/prompts.py`); empty: it cannot."""
    created: int = 0
    """Unix seconds."""
    can_resume: bool = False
    """Whether its workers take `delivered_ids`, so that an answer may move to another one."""
    aliases: Annotated[list[ModelName], msgspec.Meta(max_length=ALIASES_MAX)] = []
    """Other names that clients may ask for; workers of one model may differ in them."""
    features: list[str] = []
    """What else a request may ask for (`Feature`), sorted; everything else is refused by name."""
    passes_through: bool = False
    """Whether its workers take the clients' bodies as they are (`GenerateRequest.body`)."""
    sampling: SamplingDefaults = UNSAID
    """For what a request leaves out; a frontend fills it in."""
