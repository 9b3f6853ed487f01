"""Who serves which model: engines by name, and the state all requests share.

The seeds' semantics: the first model added is the default, and another takes its place when it
is removed; a request without a model name gets the default. Everything here is synchronous, so
no request ever sees half a change. Who calls `add_model` and `remove_model` when workers come and
go is the watch on `models/…`, outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Generic, Protocol, TypeVar

from ...context import Context
from ...env import Env
from ...errors import ModelAlreadyExistsError, ModelNotFoundError
from ...metrics.metrics import FrontendMetrics
from ...protocol.openai.answers import Model, ModelList
from ...protocol.openai.generate import Delta, GenerateRequest, ModelCard
from ..overview import MODELS_MAX, ModelView

__all__ = ["DeploymentState", "Engine", "ModelEngines", "ModelManager", "RemoteEngine"]


class Engine(Protocol):
    """What answers for one model: in production a routed client, in a test anything that yields.

    The generator runs inside `context.scope`, entered by its caller, so it must not enter that
    scope itself. It raises errors of `runtime/errors.py`; whatever else it raises is our bug. It
    ends after the delta that carries a finish reason.
    """

    def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]: ...


class RemoteEngine(Engine, ABC):
    """An engine whose workers come and go, and of which a caller may choose one."""

    @property
    @abstractmethod
    def has_instance(self) -> bool:
        """Whether a worker is there that would be asked and is not known to be faulty."""

    @property
    @abstractmethod
    def refused_cards(self) -> int:
        """How many workers are not asked, because their cards contradict the model's."""

    @abstractmethod
    def directed(self, instance_id: str | None, tell: Callable[[str], None]) -> Engine:
        """This engine for one request: only the worker named, if any, is asked.

        `tell` is called with the id of the one that answers, before its first delta.
        """


T = TypeVar("T")


class ModelEngines(Generic[T]):
    """Engines by model name, with a default, in the order they were added."""

    def __init__(self) -> None:
        self._engines: dict[str, T] = {}
        self._default: str | None = None

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def default(self) -> str | None:
        """The model that a request without a name gets; None while there is no model."""
        return self._default

    def add(self, model: str, engine: T) -> None:
        """Add an engine; raises `ModelAlreadyExistsError` and changes nothing if it is there."""
        if model in self._engines:
            raise ModelAlreadyExistsError(f"the model '{model}' is already served")
        self._engines[model] = engine
        if self._default is None:
            self._default = model

    def update(self, model: str, engine: T) -> None:
        """Let `engine` answer for a model that is there: its place and the default stay."""
        assert model in self._engines
        self._engines[model] = engine

    def remove(self, model: str) -> None:
        """Remove an engine; raises `ModelNotFoundError`. Requests already running keep it."""
        if self._engines.pop(model, None) is None:
            raise ModelNotFoundError(f"the model '{model}' is not served here", param="model")
        if self._default == model:
            self._default = next(iter(self._engines), None)

    def get(self, model: str | None) -> tuple[str, T]:
        """The name and engine of `model`, or of the default if the name is empty.

        Raises `ModelNotFoundError` with the models there are, as far as they fit in a sentence.
        """
        name = model or self._default
        if name is not None and name in self._engines:
            return name, self._engines[name]
        if not self._engines:
            raise ModelNotFoundError("no model is served here at present", param="model")
        known = ", ".join(list(self._engines)[:8])
        raise ModelNotFoundError(
            f"the model '{(name or '')[:80]}' does not exist; served here: {known}", param="model"
        )

    def list(self) -> list[str]:
        """The names, oldest first."""
        return list(self._engines)

    def contains(self, model: str) -> bool:
        return model in self._engines

    def engines(self) -> Iterable[T]:
        """All of them, oldest first."""
        return self._engines.values()


class DeploymentState:
    """What all requests of one service share: the engines of both endpoints, and the metrics."""

    def __init__(self, env: Env, metrics: FrontendMetrics) -> None:
        self.env = env
        self.metrics = metrics
        self.chat_completion_engines: ModelEngines[Engine] = ModelEngines()
        self.completion_engines: ModelEngines[Engine] = ModelEngines()
        self.created: dict[str, int] = {}
        """When each model came, in Unix seconds."""
        self.cards: dict[str, ModelCard] = {}
        """What workers published; nothing for models that were added without a card."""

    def get_chat_completions_engine(self, model: str | None) -> tuple[str, Engine]:
        """The name and engine for a chat; raises `ModelNotFoundError`."""
        return self.chat_completion_engines.get(model)

    def get_completions_engine(self, model: str | None) -> tuple[str, Engine]:
        """The name and engine for a completion; raises `ModelNotFoundError`."""
        return self.completion_engines.get(model)

    def context_tokens_max(self, model: str) -> int:
        """How many tokens the context of `model` holds, as its card says; 0 if it does not."""
        card = self.cards.get(model)
        return 0 if card is None else card.context_tokens_max

    def models(self) -> list[str]:
        """The names of all models, oldest first."""
        return [
            *self.chat_completion_engines.list(),
            *(
                name
                for name in self.completion_engines.list()
                if not self.chat_completion_engines.contains(name)
            ),
        ]

    @property
    def has_instance(self) -> bool:
        """Whether anybody could answer a request for any model."""
        kinds = (self.chat_completion_engines, self.completion_engines)
        return any(
            engine.has_instance if isinstance(engine, RemoteEngine) else True
            for kind in kinds
            for engine in kind.engines()
        )

    def views(self) -> list[ModelView]:
        """The oldest `MODELS_MAX` models, each with what its card says of it."""
        return [self._view(name) for name in self.models()[:MODELS_MAX]]

    def _view(self, name: str) -> ModelView:
        card = self.cards.get(name)
        if card is None:
            return ModelView(name=name)
        return ModelView(
            name=name,
            endpoint=card.endpoint,
            engine=card.engine,
            context_tokens_max=card.context_tokens_max,
            refused_cards=self._refused_cards(name),
        )

    def _refused_cards(self, name: str) -> int:
        for kind in (self.chat_completion_engines, self.completion_engines):
            if kind.contains(name):
                engine = kind.get(name)[1]
                return engine.refused_cards if isinstance(engine, RemoteEngine) else 0
        return 0


class ModelManager:
    """Adds, removes and lists models while the service runs."""

    def __init__(self, state: DeploymentState) -> None:
        self._state = state

    def state(self) -> DeploymentState:
        """The state that the routes read."""
        return self._state

    def metrics(self) -> FrontendMetrics:
        """The metrics of the service."""
        return self._state.metrics

    def has_model_any(self, model: str) -> bool:
        """Whether either endpoint serves `model`."""
        state = self._state
        return state.chat_completion_engines.contains(model) or state.completion_engines.contains(
            model
        )

    def list_chat_completions_models(self) -> list[str]:
        return self._state.chat_completion_engines.list()

    def list_completions_models(self) -> list[str]:
        return self._state.completion_engines.list()

    def add_chat_completions_model(self, model: str, engine: Engine, *, created: int = 0) -> None:
        """Serve chats of `model`; `created` is in Unix seconds, 0 for now.

        Raises `ModelAlreadyExistsError`.
        """
        self._state.chat_completion_engines.add(model, engine)
        self._note_created(model, created)

    def add_completions_model(self, model: str, engine: Engine, *, created: int = 0) -> None:
        """Serve completions of `model`; `created` is in Unix seconds, 0 for now.

        Raises `ModelAlreadyExistsError`.
        """
        self._state.completion_engines.add(model, engine)
        self._note_created(model, created)

    def remove_chat_completions_model(self, model: str) -> None:
        """Serve no more chats of `model`; raises `ModelNotFoundError`."""
        self._state.chat_completion_engines.remove(model)
        self._forget_created(model)

    def remove_completions_model(self, model: str) -> None:
        """Serve no more completions of `model`; raises `ModelNotFoundError`."""
        self._state.completion_engines.remove(model)
        self._forget_created(model)

    def add_model(self, card: ModelCard, engine: Engine) -> None:
        """Serve what `card` offers, on both endpoints or on one; all of it or, if taken, nothing.

        Raises `ModelAlreadyExistsError`.
        """
        if self.has_model_any(card.name):
            raise ModelAlreadyExistsError(f"the model '{card.name}' is already served")
        if card.chat:
            self.add_chat_completions_model(card.name, engine, created=card.created)
        if card.completions:
            self.add_completions_model(card.name, engine, created=card.created)
        self._state.cards[card.name] = card

    def update_model(self, card: ModelCard, engine: Engine) -> None:
        """Serve what `card` offers for a model that is there already, without a gap between.

        It keeps its place among the models, the default included. Raises `ModelNotFoundError`.
        """
        if not self.has_model_any(card.name):
            raise ModelNotFoundError(f"the model '{card.name}' is not served here", param="model")
        state = self._state
        for kind, is_offered in (
            (state.chat_completion_engines, card.chat),
            (state.completion_engines, card.completions),
        ):
            if kind.contains(card.name):
                if is_offered:
                    kind.update(card.name, engine)
                else:
                    kind.remove(card.name)
            elif is_offered:
                kind.add(card.name, engine)
        if self.has_model_any(card.name):
            state.cards[card.name] = card
        else:
            self._forget_created(card.name)

    def remove_model(self, model: str) -> None:
        """Serve `model` on neither endpoint any more; raises `ModelNotFoundError`."""
        if not self.has_model_any(model):
            raise ModelNotFoundError(f"the model '{model}' is not served here", param="model")
        if self._state.chat_completion_engines.contains(model):
            self.remove_chat_completions_model(model)
        if self._state.completion_engines.contains(model):
            self.remove_completions_model(model)

    def describe(self, model: str) -> Model:
        """The entry of `model` in the models list; raises `ModelNotFoundError`."""
        if not self.has_model_any(model):
            raise ModelNotFoundError(f"the model '{model[:80]}' does not exist", param="model")
        return Model(id=model, created=self._state.created[model])

    def describe_all(self) -> ModelList:
        """The models list."""
        return ModelList(data=[self.describe(name) for name in self._state.models()])

    def _note_created(self, model: str, created: int) -> None:
        if not created:
            created = int(self._state.env.clock.wall())
        self._state.created.setdefault(model, created)
        self._state.metrics.model_came(model)

    def _forget_created(self, model: str) -> None:
        if not self.has_model_any(model):
            del self._state.created[model]
            self._state.cards.pop(model, None)
            self._state.metrics.model_gone(model)
