"""Who serves which model: one registry, looked up by name and kind.

The first model added is the default of its kind, and the oldest that is left takes its place when
it is removed; a request without a model name gets the default. An alias means the model that it was
last said to mean, and the answer carries the name that was asked for. Everything here is
synchronous, so no request ever sees half a change. Who calls `add_model` and `remove_model` when
workers come and go is the watch on `models/…`, in `discovery.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

import attrs
from msgspec import UNSET

from ...caller.client import Client
from ...caller.kv.hints import make_hint
from ...caller.migration import MigratingAnswer, MigrationPolicy
from ...context import Context
from ...engines.generation import ForwardsDeltas, Generates
from ...engines.prompts import tokenizer_of
from ...env import Env
from ...errors import (
    ModelAlreadyExistsError,
    ModelNotFoundError,
    UnavailableError,
    UnsupportedEndpointError,
)
from ...events.load import BusyLimits
from ...protocol.discovery.model_cards import ANYBODY, ModelTable
from ...protocol.openai.answers import Model, ModelList
from ...protocol.openai.fields import supported
from ...protocol.openai.generate import (
    ALIASES_MAX,
    UNSAID,
    Delta,
    Feature,
    GenerateRequest,
    ModelCard,
)
from ...sinks import Sink
from ...view.overview import MODELS_MAX, ModelView
from ..metrics import FrontendMetrics

Engine: TypeAlias = ForwardsDeltas | Generates
"""What answers for one model: in production a routed client, in a test anything that yields.

It runs inside `context.scope`, entered by its caller, so it must not enter that scope itself. It
raises errors of `runtime/errors.py`; whatever else it raises is our bug. It ends after the delta
that carries a finish reason.
"""


@attrs.define(eq=False)
class RoutedEngine:
    """An engine whose workers come and go: one request becomes one response stream of some worker.

    Only those instances are asked whose cards agree about the model: others at the same endpoint
    serve something else.
    """

    client: Client
    _table: ModelTable
    _card: ModelCard
    _migration: MigrationPolicy

    @property
    def has_instance(self) -> bool:
        """Whether a worker is there that would be asked and is not known to be faulty."""
        return self.client.router.has_live(self._servers())

    @property
    def is_there(self) -> bool:
        """Whether a worker is there that can be reached, faulty or not, and does not leave."""
        return self.client.router.is_there(self._servers())

    @property
    def refused_cards(self) -> int:
        """How many workers are not asked, because their cards contradict the model's."""
        return self._table.refused_count(self._card.name)

    def is_busy(self, limits: BusyLimits) -> bool:
        """Whether every worker that could be asked has reported that it is busy."""
        card = self._card
        limits = attrs.evolve(
            limits,
            bytes_per_token=1 if tokenizer_of(card.tokenizer) else limits.bytes_per_token,
            block_tokens=card.block_tokens or limits.block_tokens,
        )
        return self.client.router.is_busy(limits, self._servers())

    async def forward(
        self,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        worker: str | None = None,
        took: Callable[[str, int | None], None] | None = None,
        accepted: Callable[[], None] | None = None,
    ) -> None:
        """Hand the answer of whichever workers the router chooses to `sink` as it comes.

        Only `worker` is asked, if it is named. `took` is called with the id of the one that
        answers, and how many blocks of the prompt it had, if that is known, before its first delta;
        `accepted` once a worker has taken it; not by workers in front of another server, which cannot
        tell.
        """
        kv = self.client.router.kv
        await MigratingAnswer(
            self.client,
            request,
            context,
            sink,
            self._migration,
            instance_id=worker,
            servers=self._servers,
            is_replaced=partial(self._table.is_replaced, self._card),
            tell=took,
            accepted=None if self._card.passes_through else accepted,
            can_resume=self._card.can_resume,
            hint=None if kv is None else partial(make_hint, card=self._card, names=kv.names),
        ).run()

    def _servers(self) -> frozenset[str] | None:
        servers = self._table.servers(self._card.name)
        return None if ANYBODY in servers else servers


class ModelAwayError(UnavailableError):
    """Nobody serves the model now, but somebody has, or may: the client waits, and asks again."""


class ModelKind(enum.StrEnum):
    """What is asked of a model: a name has an engine for each kind, or for one of them."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"

    @property
    def path(self) -> str:
        return _PATHS.get(self) or f"/v1/{self.value}"


_PATHS: Final = {ModelKind.CHAT: "/v1/chat/completions", ModelKind.TOKENIZE: "/tokenize"}


@attrs.define(eq=False)
class _Served:
    created: int
    """When it came, in Unix seconds."""
    engines: dict[ModelKind, Engine] = attrs.Factory(dict)
    card: ModelCard | None = None
    """What workers published; None for a model that was added without a card."""


class ModelManager:
    """The registry: models by name, each with its engines by kind, in the order they came."""

    def __init__(self, env: Env, metrics: FrontendMetrics) -> None:
        self.env = env
        self.metrics = metrics
        self._models: dict[str, _Served] = {}
        self._defaults: dict[ModelKind, str] = {}
        self._aliases: dict[str, str] = {}
        self._away: dict[str, tuple[float, Collection[ModelKind]]] = {}
        """Models that were served and are not now: until when that is remembered, and what they did."""
        self._has_passed = False
        self.knows_all: Callable[[], bool] = lambda: True
        """Whether whoever is configured to serve models has said by now which."""

    # --- looking up ---

    def find(self, model: str | None, kind: ModelKind, path: str = "") -> tuple[str, Engine]:
        """The own name and the engine of `model`, or of the default of `kind` if it is empty.

        `model` is a name or an alias; `path` is what was asked, if not that of `kind`. Raises
        `ModelAwayError` if it was served a while ago, or if nothing is served at all,
        `UnsupportedEndpointError` with what works if it does something else, or
        `ModelNotFoundError` with the models there are, as far as they fit in a sentence.
        """
        name = self._own_name(model) if model else self._defaults.get(kind, "")
        served = self._models.get(name)
        if served is not None and kind in served.engines:
            return name, served.engines[kind]
        if served is not None:
            raise UnsupportedEndpointError.of(
                f"the model '{name[:80]}'",
                path or kind.path,
                [other.path for other in served.engines],
            )
        self._check_away(name, kind)
        if not name:
            there = {other for each in self._models.values() for other in each.engines}
            works = [other.path for other in ModelKind if other in there]
            raise UnsupportedEndpointError.of("no model served here", path or kind.path, works)
        known = self.models(kind) or self.models()
        raise ModelNotFoundError(
            f"the model '{name[:80]}' does not exist; served here: {', '.join(known[:8])}",
            param="model",
        )

    def _check_away(self, name: str, kind: ModelKind | None) -> None:
        if not self._models:
            raise ModelAwayError("no model is served here at present")
        if name:
            away = [self._away[name]] if name in self._away else []
        else:
            away = [] if self.models(kind) else list(self._away.values())
        is_away = any(
            until > self.env.clock.now() and (kind is None or kind in kinds)
            for until, kinds in away
        )
        if is_away or not self.knows_all():
            raise ModelAwayError(f"nobody serves {repr(name[:80]) if name else kind} at present")

    @property
    def passes_any(self) -> bool:
        """Whether any model may take the bodies of its requests as they are."""
        return self._has_passed or not self._models

    def engines(self, kind: ModelKind) -> Iterator[Engine]:
        return (s.engines[kind] for s in self._models.values() if kind in s.engines)

    def models(self, kind: ModelKind | None = None) -> list[str]:
        """The names of all models, or of those of one kind, oldest first."""
        return [
            name for name, served in self._models.items() if kind is None or kind in served.engines
        ]

    def list_chat_completions_models(self) -> list[str]:
        return self.models(ModelKind.CHAT)

    def list_completions_models(self) -> list[str]:
        return self.models(ModelKind.COMPLETIONS)

    def has_model_any(self, model: str) -> bool:
        return model in self._models

    def card(self, model: str) -> ModelCard | None:
        """What workers published of `model`, which is served; None if it was added without a card."""
        return self._models[model].card

    @property
    def has_instance(self) -> bool:
        return any(
            engine.has_instance if isinstance(engine, RoutedEngine) else True
            for served in self._models.values()
            for engine in served.engines.values()
        )

    def describe(self, model: str) -> Model:
        """The entry of a name or alias in the models list; raises `ModelNotFoundError`."""
        name = self._own_name(model)
        if name not in self._models:
            self._check_away(name, None)
            raise ModelNotFoundError(f"the model '{model[:80]}' does not exist", param="model")
        served = self._models[name]
        card = served.card or ModelCard(name=name, endpoint="")
        paths = tuple(kind.path for kind in served.engines)
        obeyed = [*supported(paths, frozenset(card.features))]
        return Model(
            id=model,
            created=served.created,
            root=name,
            max_model_len=card.context_tokens_max or UNSET,
            supported_parameters=UNSET if card.passes_through else obeyed,
            default_parameters=UNSET if card.sampling == UNSAID else card.sampling,
        )

    def describe_all(self) -> ModelList:
        aliases = [alias for alias, name in self._aliases.items() if name in self._models]
        return ModelList(data=[self.describe(name) for name in (*self._models, *aliases)])

    def _own_name(self, model: str) -> str:
        return model if model in self._models else self._aliases.get(model, model)

    def views(self) -> list[ModelView]:
        """The oldest `MODELS_MAX` models, each with what its card says of it."""
        aliases: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            aliases.setdefault(name, []).append(alias)
        views = []
        for name, served in islice(self._models.items(), MODELS_MAX):
            card = served.card
            if card is None:
                views.append(ModelView(name=name))
                continue
            engine = next(iter(served.engines.values()))
            views.append(
                ModelView(
                    name=name,
                    aliases=aliases.get(name, [])[:ALIASES_MAX],
                    endpoint=card.endpoint,
                    engine=card.engine,
                    context_tokens_max=card.context_tokens_max,
                    refused_cards=engine.refused_cards if isinstance(engine, RoutedEngine) else 0,
                )
            )
        return views

    # --- coming and going ---

    def add_chat_completions_model(self, model: str, engine: Engine, *, created: int = 0) -> None:
        """Serve chats of `model`; `created` is in Unix seconds, 0 for now.

        Raises `ModelAlreadyExistsError`.
        """
        self._add(model, ModelKind.CHAT, engine, created)

    def add_completions_model(self, model: str, engine: Engine, *, created: int = 0) -> None:
        """Serve completions of `model`; `created` is in Unix seconds, 0 for now.

        Raises `ModelAlreadyExistsError`.
        """
        self._add(model, ModelKind.COMPLETIONS, engine, created)

    def add_model(self, card: ModelCard, engine: Engine) -> None:
        """Serve what `card` offers, on each endpoint of its kinds; all of it or, if taken, nothing.

        Raises `ModelAlreadyExistsError`.
        """
        if card.name in self._models:
            raise ModelAlreadyExistsError(f"the model '{card.name}' is already served")
        for kind in _kinds(card):
            self._add(card.name, kind, engine, card.created)
        if card.name in self._models:
            self._models[card.name].card = card
        self._has_passed |= card.passes_through

    def update_model(self, card: ModelCard, engine: Engine) -> None:
        """Serve what `card` offers for a model that is there already, without a gap between.

        It keeps its place among the models, the default included. Raises `ModelNotFoundError`.
        """
        served = self._served(card.name)
        served.card, served.engines = card, dict.fromkeys(_kinds(card), engine)
        self._settle(card.name)
        self._has_passed |= card.passes_through

    def set_aliases(self, models: Mapping[str, str]) -> None:
        """From now on these aliases, and no others, mean these models; a name always wins.

        Those of models that are away stay theirs until somebody else has them.
        """
        kept = {alias: name for alias, name in self._aliases.items() if name in self._away}
        self._aliases = kept | dict(models)

    def remove_chat_completions_model(self, model: str) -> None:
        """Serve no more chats of `model`; raises `ModelNotFoundError`."""
        self._remove(model, ModelKind.CHAT)

    def remove_completions_model(self, model: str) -> None:
        """Serve no more completions of `model`; raises `ModelNotFoundError`."""
        self._remove(model, ModelKind.COMPLETIONS)

    def remove_model(self, model: str) -> None:
        """Serve `model` on no endpoint any more; raises `ModelNotFoundError`.

        Requests already running keep its engine.
        """
        self._served(model).engines.clear()
        self._settle(model)

    def retire_model(self, model: str, away_s: float) -> None:
        """As `remove_model`, of one that may come back: `find` tells of it so long."""
        now = self.env.clock.now()
        # The oldest first, and no other is looked at: thousands may go at once.
        while self._away and next(iter(self._away.values()))[0] <= now:
            del self._away[next(iter(self._away))]
        self._away[model] = now + away_s, tuple(self._served(model).engines)
        if len(self._away) > MODELS_MAX:
            del self._away[next(iter(self._away))]
        self.remove_model(model)

    def _add(self, model: str, kind: ModelKind, engine: Engine, created: int) -> None:
        served = self._models.get(model)
        if served is None:
            served = self._models[model] = _Served(created or int(self.env.clock.wall()))
            self._away.pop(model, None)
            self.metrics.model_came(model)
        if kind in served.engines:
            raise ModelAlreadyExistsError(f"the model '{model}' is already served")
        served.engines[kind] = engine
        self._settle(model)

    def _remove(self, model: str, kind: ModelKind) -> None:
        if self._served(model).engines.pop(kind, None) is None:
            raise ModelNotFoundError(f"the model '{model}' is not served here", param="model")
        self._settle(model)

    def _served(self, model: str) -> _Served:
        if model not in self._models:
            raise ModelNotFoundError(f"the model '{model}' is not served here", param="model")
        return self._models[model]

    def _settle(self, model: str) -> None:
        """After a change of `model`: forget it if nothing is left, and see to the defaults."""
        if not self._models[model].engines:
            del self._models[model]
            self.metrics.model_gone(model)
        for kind in ModelKind:
            served = self._models.get(self._defaults.get(kind, ""))
            if served is None or kind not in served.engines:
                self._defaults[kind] = next(iter(self.models(kind)), "")


def _kinds(card: ModelCard) -> list[ModelKind]:
    offered = {
        ModelKind.CHAT: card.chat,
        ModelKind.COMPLETIONS: card.completions,
        ModelKind.EMBEDDINGS: card.passes_through or Feature.EMBEDDINGS in card.features,
        ModelKind.TOKENIZE: card.passes_through or Feature.TOKENIZE in card.features,
    }
    return [kind for kind, is_offered in offered.items() if is_offered]
