"""A process that only calls: the models and the endpoints of a cluster, for programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypedDict

import msgspec
from typing_extensions import Unpack

from trinamo.runtime.caller.client import Client
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.engines.generation import forward_of
from trinamo.runtime.env import RealEnv, draw_id
from trinamo.runtime.errors import DeadlineError, KilledError
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.models.models import ModelKind, ModelManager
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.process.roles import follow_models
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import ChatMessage, Delta, GenerateRequest
from trinamo.runtime.sinks import Iteration

from .planes import RealTransports
from .run_file import running_config

DELTAS_MAX: Final = 256
"""Of one answer that its reader has not taken yet; then the worker waits."""
Prompt = str | Sequence[ChatMessage] | GenerateRequest


class GenerateOptions(TypedDict, total=False):
    """Fields of `GenerateRequest` beside the model and the prompt."""

    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: list[str]
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: list[int]
    json_schema: str
    regex: str
    choices: list[str]
    grammar: str
    chat_template_kwargs: str
    continue_final_message: bool
    return_token_ids: bool
    cache_prompt: bool
    tools: str
    tool_choice: str
    parallel_tool_calls: bool


class Caller:
    """A connection to a cluster, made by `connect`."""

    def __init__(self, runtime: Runtime, models: ModelManager) -> None:
        self.runtime = runtime
        """All else that a process of the cluster can do, such as its work queues."""
        self._models = models

    def models(self) -> list[str]:
        """The names of the models that are served now, the oldest first."""
        return self._models.models()

    async def client(self, endpoint: str | EndpointName) -> Client:
        """The client of an endpoint, as `namespace/component/endpoint`; open as long as this is.

        Returns once its live set is known, be it empty. Raises `RequestError` for what is no such
        name.
        """
        name = EndpointName.parse(endpoint) if isinstance(endpoint, str) else endpoint
        return await self.runtime.client(name)

    @asynccontextmanager
    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        context: Context | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """The answer to a prompt or a conversation, delta by delta; leaving early ends it.

        It goes on at another worker if its own leaves, as configured, like a frontend's.

        Args:
            prompt: What the user says, a conversation, or a whole request.
            model: A name or an alias; empty: the oldest model, or that of the request.
            context: To stop or to limit it by; a reader that just leaves needs none.
            options: Fields of `GenerateRequest`, such as `max_tokens` and `temperature`.

        Raises:
            ModelNotFoundError: Nobody serves that model; the sentence says which are there.
            RequestError: A worker refuses the request.
            TypeError: The prompt is something else, or an option is none.
        """
        request = _request_of(prompt, model, options)
        name, engine = self._models.find(request.model or None, ModelKind.CHAT)
        request = msgspec.structs.replace(request, model=name)
        rng = self.runtime.env.rng
        context = context or Context(draw_id(rng))
        received: Iteration[Delta] = Iteration(DELTAS_MAX)

        async def receive() -> None:
            try:
                with context.scope:
                    await forward_of(engine)(request, context, received)
            except Exception as error:  # noqa: BLE001 -- whatever it is, its reader is told
                received.finish(error)
            else:
                cut: Exception = DeadlineError("the answer's time is up")
                if context.is_killed:
                    cut = KilledError("the request was killed", reason=str(context.reason))
                received.finish(cut if context.scope.cancelled_caught else None)

        async with open_nursery() as nursery:
            nursery.start_soon(receive)
            yield received
            nursery.cancel_scope.cancel()

    async def answer(
        self, prompt: Prompt, *, model: str = "", **options: Unpack[GenerateOptions]
    ) -> str:
        """The whole text of the answer to a prompt or a conversation; see `generate`."""
        async with self.generate(prompt, model=model, **options) as deltas:
            return "".join([delta.text async for delta in deltas])


def _request_of(prompt: Prompt, model: str, options: GenerateOptions) -> GenerateRequest:
    if isinstance(prompt, GenerateRequest):
        changes = {"model": model} if model else {}
        return msgspec.structs.replace(prompt, **changes, **options)
    try:
        turns = [ChatMessage("user", prompt)] if isinstance(prompt, str) else list(prompt)
    except TypeError:
        what = type(prompt).__name__
        raise TypeError(
            f"a prompt is text, a list of ChatMessage or a GenerateRequest, not {what}"
        ) from None
    return GenerateRequest(model=model, messages=turns, **options)


@asynccontextmanager
async def connect(config: Config | None = None) -> AsyncIterator[Caller]:
    """Connect to a cluster as one that only calls: its models, its endpoints, its queues.

    Without `config` it is the cluster that `trinamo up` runs on this machine, with its tokens and its
    secret, unless the environment names another. Leaving ends what is still under way.

    Raises `ConfigError` if several run here and none is named, and `ConnectError` if none answers;
    the sentence says what to do.
    """
    config = config or running_config()
    env = RealEnv()
    metrics = FrontendMetrics(env)
    async with (
        open_runtime(config, env, RealTransports(), metrics=metrics) as runtime,
        open_nursery() as watching,
    ):
        models = ModelManager(env, metrics)
        await follow_models(watching, runtime, models)
        yield Caller(runtime, models)
        watching.cancel_scope.cancel()
