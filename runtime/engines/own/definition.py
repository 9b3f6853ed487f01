"""`@trinamo.engine`: what makes an engine of an async generator, and how it is opened.

What may be decorated, from the smallest: an async generator function; a class whose objects have
one called `answer`, and that may be an async context manager, for an engine that loads something;
a function that returns an async context manager whose value is one of these, or any
`GenerationEngine`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

import attrs
import msgspec

from ...errors import ConfigError, TrinamoError
from ...nurseries import single
from ...protocol.openai.generate import UNSAID, Delta, Feature, SamplingDefaults
from ..generation import EngineInfo, GenerationEngine
from .serving import Answering, GeneratorEngine
from .telling import told

if TYPE_CHECKING:
    from .asyncio_engines import AsyncioLoop


LoopName = Literal["trio", "asyncio"]
CONTEXT_TOKENS_MAX: Final = 8192
_CONTEXT_TOKENS_MIN: Final = 16


@attrs.frozen(eq=False)
class EngineDefinition:
    """What `engine` makes of a generator: `trinamo.serve` and `trinamo worker` open it.

    Called, it is what was decorated.
    """

    factory: Callable[..., Any]
    name: str
    context_tokens_max: int = CONTEXT_TOKENS_MAX
    loop: LoopName = "trio"
    features: frozenset[str] = frozenset()
    sampling: SamplingDefaults = UNSAID

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.factory(*args, **kwargs)

    @asynccontextmanager
    async def open(
        self,
        *,
        model: str | None = None,
        context_tokens_max: int | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> AsyncIterator[GenerationEngine]:
        """The engine, with what it loads, while inside.

        `model` and `context_tokens_max` replace the definition's own; `arguments` are passed by
        keyword, made to what the parameters are annotated with. Raises `ConfigError` if it cannot be opened, with a
        sentence that says where.
        """
        info = EngineInfo(
            engine=self.name,
            model=model or self.name,
            context_tokens_max=context_tokens_max or self.context_tokens_max,
            features=self.features,
            sampling=self.sampling,
        )
        async with AsyncExitStack() as stack:
            try:
                opened = await self._enter(stack, info, self._fitted(arguments or {}))
            except TrinamoError:
                raise
            except (Exception, SystemExit) as raised:
                sentence = f"engine {self.name} cannot be opened: {told(single(raised))}"
                raise ConfigError(sentence) from raised
            if isinstance(opened, GeneratorEngine):
                stack.enter_context(opened.stalls.watched())
            yield opened

    @property
    def is_opened_to_be_known(self) -> bool:
        """Whether it makes an engine that names its model itself: `name` is that of the function."""
        factory = self.factory
        is_own = inspect.isfunction(factory) and not inspect.isasyncgenfunction(factory)
        return is_own and self.name == factory.__name__

    def check(self, arguments: Mapping[str, str]) -> None:
        """Raise `ConfigError` for what `open` would refuse, as far as is seen without opening it."""
        factory, fitted = self.factory, self._fitted(arguments)
        if inspect.isasyncgenfunction(factory):
            self._callable(partial(factory, **fitted))
            return
        self._refuse_an_answer_that_does_not_yield(fitted)
        # What a class enters may be something else, but not if it has an `answer`, whose `yield` was
        # forgotten then; and an engine of one's own has all three.
        enters_another = hasattr(factory, "__aenter__") and not hasattr(factory, "answer")
        if inspect.isclass(factory) and not (enters_another or hasattr(factory, "generate")):
            self._answering(factory)

    async def _enter(
        self, stack: AsyncExitStack, info: EngineInfo, arguments: Mapping[str, Any]
    ) -> GenerationEngine:
        loop: AsyncioLoop | None = None
        if self.loop == "asyncio":
            # It brings asyncio along, which nobody else need pay for.
            from .asyncio_engines import open_asyncio_loop  # noqa: PLC0415

            loop = await stack.enter_async_context(open_asyncio_loop())
        if inspect.isasyncgenfunction(self.factory):
            value: Any = partial(self.factory, **arguments)
        else:
            self._refuse_an_answer_that_does_not_yield(arguments)
            value = await stack.enter_async_context(_entering(self.factory(**arguments), loop))
        if all(hasattr(value, name) for name in ("info", "generate", "statistics")):
            engine: GenerationEngine = value
            return engine
        bridge = None if loop is None else loop.iterate
        return GeneratorEngine(info, self._callable(self._answering(value)), bridge)

    def _callable(self, answering: Answering) -> Answering:
        """`answering`, unless it cannot be called with a request and a context."""
        try:
            inspect.signature(answering).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"engine {self.name} cannot be asked: {error}; it is called with (request, context),"
                " and what else it takes comes from --engine-arg or has a default"
            ) from None
        return answering

    def _refuse_an_answer_that_does_not_yield(self, arguments: Mapping[str, Any]) -> None:
        """Otherwise Python says that `request` and `context` are missing, which helps nobody."""
        if not inspect.isfunction(self.factory):
            return
        lacking = [
            each.name
            for each in inspect.signature(self.factory).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
            if each.name not in arguments
        ]
        if lacking or inspect.iscoroutinefunction(self.factory):
            raise ConfigError(
                f"engine {self.name} is no async generator; write `async def answer(request,"
                " context)` with `yield` in it"
                + (f" (as it is, it lacks {', '.join(lacking)})" if lacking else "")
            )

    def _answering(self, value: Any) -> Answering:
        answering: Any
        for answering in (value, getattr(value, "answer", None)):
            if _is_generator(answering):
                return cast("Answering", answering)
        what = "class" if inspect.isclass(value) else type(value).__name__
        raise ConfigError(
            f"engine {self.name} is no async generator `answer(request, context)`, and has none"
            f" (it is a {what}); write `async def` with `yield` in it"
        )

    def _fitted(self, arguments: Mapping[str, str]) -> Mapping[str, Any]:
        """The arguments as the factory's parameters want them."""
        takes = _parameters(self.factory)
        fitted: dict[str, Any] = {}
        for name, text in arguments.items():
            if takes is not None and name not in takes:
                raise ConfigError(
                    f"engine {self.name} takes no argument {name!r}; it takes"
                    f" {', '.join(takes) or 'none'}"
                )
            fitted[name] = self._converted(name, text, (takes or {}).get(name))
        return fitted

    def _converted(self, name: str, text: str, wanted: Any) -> Any:
        if wanted not in _CONVERTIBLE:
            return text
        try:
            return msgspec.convert(text, wanted, strict=False)
        except msgspec.ValidationError as error:
            wants = str(error).removeprefix("Expected ").partition(",")[0]
            raise ConfigError(
                f"engine {self.name}: its argument {name} is {wants}, not {text!r}"
            ) from error


_CONVERTIBLE: Final = (int, float, bool, int | None, float | None, bool | None)


def _parameters(factory: Callable[..., Any]) -> dict[str, Any] | None:
    """What may be passed by keyword, with annotations; None if it takes anything."""
    try:
        found = inspect.signature(factory, eval_str=True).parameters
    except (NameError, TypeError, ValueError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in found.values()):
        return None
    # Of a generator the first two are the request and its context.
    skipped = 2 if inspect.isasyncgenfunction(factory) else 0
    takes = [each for each in found.values() if each.kind is not each.POSITIONAL_ONLY]
    return {each.name: each.annotation for each in takes[skipped:]}


def _is_generator(value: Any) -> bool:
    if isinstance(value, partial):
        return _is_generator(value.func)
    return inspect.isasyncgenfunction(value)


def _entering(value: Any, loop: AsyncioLoop | None) -> AbstractAsyncContextManager[Any]:
    """What a factory has made: entered, if it is a context manager."""
    if not hasattr(type(value), "__aenter__"):
        return nullcontext(value)
    manager: AbstractAsyncContextManager[Any] = value
    return manager if loop is None else loop.within(manager)


def defined(value: Any, name: str = "") -> EngineDefinition:
    """The definition of an engine that need not be decorated; raises `ConfigError`."""
    if isinstance(value, EngineDefinition):
        return value
    if not callable(value):
        what = name or repr(value)[:80]
        raise ConfigError(f"{what} is no engine, but {type(value).__name__}; see @trinamo.engine")
    return EngineDefinition(value, getattr(value, "__name__", "") or type(value).__name__)


_Factory = (
    Callable[..., AsyncIterator[str | Delta]]
    | Callable[..., AbstractAsyncContextManager[Any]]
    | type[Any]
)


@overload
def engine(factory: _Factory, /) -> EngineDefinition: ...
@overload
def engine(
    *,
    name: str = "",
    context_tokens_max: int = CONTEXT_TOKENS_MAX,
    loop: LoopName = "trio",
    features: Iterable[str] = (),
    sampling: SamplingDefaults = UNSAID,
) -> Callable[[_Factory], EngineDefinition]: ...
def engine(
    factory: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    context_tokens_max: int = CONTEXT_TOKENS_MAX,
    loop: LoopName = "trio",
    features: Iterable[str] = (),
    sampling: SamplingDefaults = UNSAID,
) -> Any:
    """Make an engine of `async def answer(request, context)` that yields the answer bit by bit.

        @trinamo.engine(name="parrot", context_tokens_max=1024)
        async def parrot(request, context):
            for word in request.text.split():
                yield word + " "

    What it yields is `str` or `Delta`. All else is filled in: stop strings and `max_tokens` end the
    answer, and so does the client that leaves; its end is a `stop` unless a `Delta` says otherwise.
    A `str` counts as one token, and so does a `Delta` without `token_ids`, until the first that has
    some: then they are counted. The prompt counts a token a word, unless a `Delta` says
    `prompt_tokens`.

    `request.text` is what to answer, `request.turns` the conversation. Stop sets
    `context.is_stopped`; the next item is then the end. Kill cancels the generator where it waits.
    It may raise `RequestError` (the client's mistake) and `OverloadedError`; all else is told to the
    operator, and to the client as a failure without its text. It must not compute for long between two
    awaits: `await trio.to_thread.run_sync(model.step)`.

    An engine that loads something is a class with `answer` and, if need be, `__aenter__`, or a
    function that returns an async context manager whose value is such a generator. Further parameters come from
    `--engine-arg NAME=VALUE`, as `int`, `float` or `bool` where they are annotated so.

    Args:
        factory: What is decorated.
        name: Of the engine, and of its model unless the worker has another; None: the factory's own.
        context_tokens_max: Prompt and answer together; longer prompts are refused.
        loop: `asyncio` for a generator that awaits asyncio's functions: it runs in an asyncio loop
            inside trio, and Kill is its `CancelledError`.
        features: What it does with a request besides: of `logprobs`, `penalties`, `logit_bias`,
            `top_k`, `min_p`, `json_schema`, `grammar`, `tools`, `end_tokens`, `prompt_logprobs`,
            `chat_template`, `tokenize`, `embeddings`. A request that asks for another is refused.
        sampling: What a request that says nothing of it is asked with: `SamplingDefaults(temperature=0.7)`.

    Raises:
        ValueError: For a context of less than 16 tokens, an unknown loop, or an unknown feature.
    """
    if context_tokens_max < _CONTEXT_TOKENS_MIN:
        raise ValueError(f"context_tokens_max is {context_tokens_max}; at least 16 are needed")
    if loop not in ("trio", "asyncio"):
        raise ValueError(f"loop is {loop!r}; it is 'trio' or 'asyncio'")

    can = frozenset(map(str, features))
    unknown = sorted(can - set(Feature))
    if unknown:
        raise ValueError(f"no feature: {', '.join(unknown)}; there are {', '.join(Feature)}")

    def define(made: Callable[..., Any]) -> EngineDefinition:
        own = defined(made)
        return attrs.evolve(
            own,
            name=name or own.name,
            context_tokens_max=context_tokens_max,
            loop=loop,
            features=can,
            sampling=sampling,
        )

    return define if factory is None else define(factory)
