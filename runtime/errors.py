"""Everything that can go wrong, in one tree.

Each class says whose fault it is and what the receiver should do. `definite` answers one
question: did the operation certainly not happen? Only then, or while no byte of the answer has
reached the client, may a call be retried. `code` is the word that travels on the wire; the tree
is rebuilt from it on the other side by `error_from_wire`. HTTP status codes live in
`http/status.py`, nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final

_BROUGHT_BY: Final = {
    "asyncio": ("trio_asyncio",),
    "cluster": (
        *("cryptography", "google", "grpc", "h2", "httptools", "hypercorn", "nats", "numpy"),
        *("prometheus_client", "starlette", "yaml"),
    ),
    "llamacpp": ("cyllama", "jinja2", "llguidance"),
    "sim": ("httpx",),
    "testing": ("hypothesis",),
}
"""The modules that only an extra of the distribution brings."""


def extra_wanted(error: BaseException) -> str | None:
    """What to install if a module is not there because its extra is not; None for another error."""
    name = (error.name if isinstance(error, ModuleNotFoundError) else None) or ""
    top = name.partition(".")[0]
    for extra, modules in _BROUGHT_BY.items():
        if top in modules:
            return f"this needs the extra {extra}; pip install 'trinamo[{extra}]'"
    return None


class TrinamoError(Exception):
    """The root of the tree; never raised itself."""

    code: ClassVar[str] = "internal"
    default_definite: ClassVar[bool] = False

    def __init__(self, message: str, *, definite: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.definite = self.default_definite if definite is None else definite


class ConfigError(TrinamoError):
    """The configuration is wrong. The operator mends the key the message names; nothing started."""

    code = "config"
    default_definite = True


class BackendMissingError(ConfigError):
    """This machine cannot use a transfer backend. Use the next one, or install its library."""

    code = "backend_missing"


class RequestError(TrinamoError):
    """The client's request is wrong; asking again without changing it is useless."""

    code = "invalid_request"
    default_definite = True

    def __init__(
        self, message: str, *, param: str | None = None, definite: bool | None = None
    ) -> None:
        super().__init__(message, definite=definite)
        self.param = param


class ModelNotFoundError(RequestError):
    """The client asks for a model that no live worker serves. It should list the models."""

    code = "model_not_found"


class UnsupportedEndpointError(RequestError):
    """The client asks for what this server, or this model of it, does not do. It asks what works."""

    code = "unsupported_endpoint"

    @classmethod
    def of(cls, who: str, path: str, works: Iterable[str]) -> UnsupportedEndpointError:
        """`who` does not answer `path`; `works` are the paths that it does answer."""
        does_not = "answers" if who.startswith("no ") else "does not answer"
        use = ", ".join(works)
        return cls(f"{who} {does_not} {path}" + (f"; use {use}" if use else ""))


class ContextLengthError(RequestError):
    """The client's prompt is too long for the model. It shortens it, or asks a larger model."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, context_tokens_max: int, length: str, param: str) -> ContextLengthError:
        """`length` is the prompt's, such as `5031 tokens`; programs know the sentence by its words."""
        return cls(
            f"This model's maximum context length is {context_tokens_max} tokens, and the prompt is"
            f" too long for it: {length}; shorten it",
            param=param,
        )


class ModelAlreadyExistsError(TrinamoError):
    """Our caller adds a model under a name that is taken. It removes the old one first."""

    code = "model_already_exists"
    default_definite = True


class ProtocolError(TrinamoError):
    """A step that the protocol tables do not list. Abstract: see the two sides below."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """Our own bug: this side was about to take a step the tables forbid. Never retried."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The peer took a step the tables forbid, or sent bytes that are no frame.

    It ends that one stream or connection, never the process.
    """

    code = "remote_protocol"


class UnavailableError(TrinamoError):
    """Nobody to ask: no live instance, a draining worker, an unknown endpoint. Try another."""

    code = "unavailable"
    default_definite = True


class UnknownModelError(UnavailableError):
    """The worker that was asked serves another model. Nothing ran: ask one whose card names it."""

    code = "unknown_model"


class OverloadedError(TrinamoError):
    """A named bound was reached. Ask another instance, or this one later."""

    code = "overloaded"
    default_definite = True

    def __init__(
        self,
        message: str,
        *,
        bound: str = "",
        value: float = 0,
        retry_after_s: float = 0,
        definite: bool | None = None,
    ) -> None:
        super().__init__(message, definite=definite)
        self.bound = bound
        self.value = value
        self.retry_after_s = retry_after_s
        """What whoever refused asks for; 0: it did not say."""


class RateLimitedError(OverloadedError):
    """The upstream says that it is asked too often (429). Ask another, or it when it says."""

    code = "rate_limited"


class RefusedError(TrinamoError):
    """The peer said no before any work started (in its prologue, or with a `refused` frame)."""

    code = "refused"
    default_definite = True


class TransportError(TrinamoError):
    """The link failed. Bytes may have gone out: not definite unless the subclass says so."""

    code = "transport"


class ConnectError(TransportError):
    """No connection could be made, so nothing was sent. Ask another instance."""

    code = "connect"
    default_definite = True


class ImpostorError(ConnectError):
    """Who answers at the peer's address is not who was meant, or no process of this cluster.

    Nothing was sent. Inhibit the instance and ask another; discovery, or the secret, is wrong.
    """

    code = "impostor"


class DisconnectedError(TransportError):
    """The connection or the instance went away before the end mark.

    The work may have been done in part: inhibit the instance, then migrate the request or fail it.
    """

    code = "disconnected"


class SilentError(DisconnectedError):
    """The worker, or the upstream, fell silent while it held the request, which may be why.

    As its parent; but after the second one no other worker is asked.
    """

    code = "silent"


class UpstreamError(TransportError):
    """The server behind a worker failed, or answered with an error of its own (5xx).

    Ask another instance while the client has nothing of the answer; inhibit this one.
    """

    code = "upstream"


class UnknownOutcomeError(TransportError):
    """A write to a plane was sent and its answer never came: it may or may not have happened.

    Read the state again before deciding; writes guarded by a revision are safe to repeat.
    """

    code = "unknown_outcome"


class TransferError(TransportError):
    """A transfer of KV blocks failed for a reason of its backend's own.

    Nothing that arrived may be used; ask another backend, or compute the blocks again.
    """

    code = "transfer"


class CorruptedError(TransferError):
    """Blocks arrived with other bytes than were sent. Transfer them again; look at the machine."""

    code = "corrupted"


class StaleMemoryError(TransferError):
    """The memory described is not there any more, or is laid out otherwise. Nothing was moved.

    The peer has restarted, renewed or withdrawn its region, or revoked the blocks: ask it for a
    new description.
    """

    code = "stale_memory"
    default_definite = True


class IncompatibleKvError(StaleMemoryError):
    """The peer's KV bytes mean something else than ours; the message says in what they differ.

    Nothing was moved, and nothing ever will be between these two: compute the prompt here, and
    run the same engine, version, model and layout on both sides.
    """

    code = "incompatible_kv"


class MetadataNotFoundError(TransferError):
    """No engine of this id has stored metadata, or its worker is gone. Ask discovery who lives."""

    code = "metadata_not_found"
    default_definite = True


class ControlPlaneError(TrinamoError):
    """The control store answered with an error that is none of the others here."""

    code = "control_plane"


class CompactedError(ControlPlaneError):
    """The revision asked for is gone from the store's history. List again, then watch."""

    code = "compacted"
    default_definite = True

    def __init__(
        self, message: str, *, compact_revision: int = 0, definite: bool | None = None
    ) -> None:
        super().__init__(message, definite=definite)
        self.compact_revision = compact_revision


class LeaseLostError(ControlPlaneError):
    """The store no longer knows the lease, so its keys are gone. Grant anew and put them again."""

    code = "lease_lost"
    default_definite = True


class FencedError(ControlPlaneError):
    """Somebody else holds the key under a living lease. Nothing was written.

    Two processes claim one identity: the one that came second stays out until the other is gone.
    """

    code = "fenced"
    default_definite = True


class EventPlaneError(TrinamoError):
    """The message broker answered with an error that is none of the others here."""

    code = "event_plane"


class EngineError(TrinamoError):
    """The engine or handler raised. Carries the worker's words; the worker logged the rest."""

    code = "engine"


class GrammarDeadEndError(EngineError):
    """The form that the client asked for fits no text that goes on like its answer.

    The message names the place in the answer. The client changes that part of its schema, or reports the schema.
    """

    code = "grammar_dead_end"


class DeadlineError(TrinamoError):
    """The time given is up. What was asked may still be going on until its Kill arrives."""

    code = "deadline"


class StalledError(DeadlineError):
    """A transfer backend stands still, by no fault of who waits. Another backend may do it."""

    code = "stalled"


class KilledError(TrinamoError):
    """The request was killed on our side, so no more of its answer is wanted.

    Not a fault: whoever killed it knows why, and `reason` says it to everyone else.
    """

    code = "killed"

    def __init__(self, message: str, *, reason: str = "", definite: bool | None = None) -> None:
        super().__init__(message, definite=definite)
        self.reason = reason


def _concrete(cls: type[TrinamoError]) -> dict[str, type[TrinamoError]]:
    found: dict[str, type[TrinamoError]] = {}
    for sub in cls.__subclasses__():
        found |= _concrete(sub)
    # Last: a class without a code of its own travels as its parent, whoever has imported it.
    return found | {cls.code: cls}


def error_to_wire(error: TrinamoError) -> dict[str, Any]:
    """The fields that travel: `code`, `message`, `definite`; `retry_after_s` and `param` where they are."""
    told = {"code": error.code, "message": error.message, "definite": error.definite}
    if isinstance(error, OverloadedError) and error.retry_after_s:
        told["retry_after_s"] = math.ceil(error.retry_after_s)
    if isinstance(error, RequestError) and error.param:
        told["param"] = error.param
    return told


def error_from_wire(
    code: str, message: str, *, definite: bool, retry_after_s: int = 0, param: str = ""
) -> TrinamoError:
    """Rebuild the error a peer told us about; an unknown code becomes an `EngineError`.

    Codes that only make sense on the side that raised them (`killed`, `local_protocol`, `config`)
    arrive as `EngineError` too: to us the peer's bug is an engine failure, not ours.
    """
    cls = _concrete(TrinamoError).get(code, EngineError)
    if cls in (TrinamoError, KilledError, LocalProtocolError, ConfigError):
        cls = EngineError
    if issubclass(cls, OverloadedError):
        return cls(message, definite=definite, retry_after_s=retry_after_s)
    if issubclass(cls, RequestError):
        return cls(message, definite=definite, param=param or None)
    return cls(message, definite=definite)
