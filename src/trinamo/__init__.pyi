# What is public, once: a section for each purpose; `__init__.py` imports each name from here.

# A process of a cluster, and the endpoints that it serves and calls.
from .transports.assembly.process import (
    open_runtime as open_runtime,
    serve_bidirectional as serve_bidirectional,
    serve_stream as serve_stream,
    serve_unary as serve_unary,
)
from .transports.assembly.engines import (
    serve_frontend as serve_frontend,
    serve_worker as serve_worker,
)
from .transports.assembly.calling import (
    Caller as Caller,
    GenerateOptions as GenerateOptions,
    connect as connect,
)
from .runtime.process.roles import FrontendReady as FrontendReady, WorkerReady as WorkerReady
from .runtime.process.stopping import StopRequest as StopRequest
from .runtime.process.runtime import Runtime as Runtime
from .runtime.protocol.discovery.instances import EndpointName as EndpointName, Instance as Instance
from .runtime.sinks import Sink as Sink
from .runtime.context import Context as Context, Reason as Reason, State as State
from .runtime.caller.client import (
    Client as Client,
    Exchange as Exchange,
    ResponseStream as ResponseStream,
)

# Configuration.
from .runtime.config.config import Config as Config, load_config as load_config
from .transports.assembly.run_file import running_config as running_config

# Engines, and the models that frontends offer.
from .runtime.engines.generation import (
    EngineInfo as EngineInfo,
    EngineStatistics as EngineStatistics,
    ForwardsDeltas as ForwardsDeltas,
    GenerationEngine as GenerationEngine,
)
from .runtime.protocol.openai.generate import (
    ChatMessage as ChatMessage,
    Delta as Delta,
    FinishReason as FinishReason,
    GenerateRequest as GenerateRequest,
    ModelCard as ModelCard,
    SamplingDefaults as SamplingDefaults,
    TokenLogprob as TokenLogprob,
)
from .runtime.engines.own.definition import EngineDefinition as EngineDefinition, engine as engine
from .transports.assembly.engines import run as run, serve as serve
from .runtime.engines.loop.host import open_engine_host as open_engine_host
from .runtime.engines.loop.step import (
    KeepsKv as KeepsKv,
    Sampling as Sampling,
    StepEngine as StepEngine,
    StepItem as StepItem,
)
from .runtime.engines.echo import open_echo_engine as open_echo_engine
from .runtime.engines.exact.engine import open_exact_engine as open_exact_engine

# The HTTP service and its models as objects, beside `serve_frontend`: `examples/http_service.py`.
from .transports.assembly.http_service import HttpService as HttpService
from .runtime.http.models.models import ModelManager as ModelManager

# What call-home streams come to, and where engines publish their memory, in programs of their own.
from .transports.tcp.sockets import TcpOptions as TcpOptions
from .transports.tcp.streams.server import (
    TcpStreamServer as TcpStreamServer,
    open_stream_server as open_stream_server,
)
from .runtime.kv.transfer.metadata import (
    NixlMetadata as NixlMetadata,
    NixlMetadataStore as NixlMetadataStore,
)

# Work queues.
from .runtime.queues.consumer import (
    Consumer as Consumer,
    ConsumerLimits as ConsumerLimits,
    Job as Job,
    open_consumer as open_consumer,
)
from .runtime.protocol.queue.consumer import Backoff as Backoff
from .runtime.planes.events import WorkQueue as WorkQueue
from .runtime.protocol.queue.jobs import (
    JobOrigin as JobOrigin,
    LeasedJob as LeasedJob,
    QueueLimits as QueueLimits,
)

# One at a time in the whole cluster, or one leader.
from .runtime.process.lock import Lock as Lock, find_holder as find_holder, open_lock as open_lock

# KV memory that peers may move blocks to and from.
from .runtime.kv.regions import KvCache as KvCache
from .runtime.kv.memory import KvLayout as KvLayout, KvMemory as KvMemory, KvShape as KvShape
from .runtime.kv.pool import BlockPool as BlockPool
from .runtime.kv.regions import RegionSet as RegionSet
from .runtime.kv.tensors import kv_cache as kv_cache

# Servers of the extra `embedded`, for development and tests.
from .transports.servers.embedded import (
    EmbeddedServer as EmbeddedServer,
    open_etcd_server as open_etcd_server,
    open_nats_server as open_nats_server,
)

# What a process is given: clock and chance, planes, counters.
from .runtime.env import Env as Env, RealEnv as RealEnv
from .runtime.process.transports import Transports as Transports
from .transports.assembly.planes import RealTransports as RealTransports
from .runtime.http.metrics import FrontendMetrics as FrontendMetrics
from .runtime.worker.metrics import WorkerMetrics as WorkerMetrics

# Errors: one tree, each class with what to do.
from .runtime.errors import (
    BackendMissingError as BackendMissingError,
    CompactedError as CompactedError,
    ConfigError as ConfigError,
    ConnectError as ConnectError,
    ContextLengthError as ContextLengthError,
    ControlPlaneError as ControlPlaneError,
    CorruptedError as CorruptedError,
    DeadlineError as DeadlineError,
    DisconnectedError as DisconnectedError,
    EngineError as EngineError,
    EventPlaneError as EventPlaneError,
    FencedError as FencedError,
    GrammarDeadEndError as GrammarDeadEndError,
    ImpostorError as ImpostorError,
    IncompatibleKvError as IncompatibleKvError,
    KilledError as KilledError,
    LeaseLostError as LeaseLostError,
    LocalProtocolError as LocalProtocolError,
    MetadataNotFoundError as MetadataNotFoundError,
    ModelAlreadyExistsError as ModelAlreadyExistsError,
    ModelNotFoundError as ModelNotFoundError,
    OverloadedError as OverloadedError,
    ProtocolError as ProtocolError,
    RateLimitedError as RateLimitedError,
    RefusedError as RefusedError,
    RemoteProtocolError as RemoteProtocolError,
    RequestError as RequestError,
    SilentError as SilentError,
    StaleMemoryError as StaleMemoryError,
    StalledError as StalledError,
    TransferError as TransferError,
    TransportError as TransportError,
    TrinamoError as TrinamoError,
    UnavailableError as UnavailableError,
    UnknownModelError as UnknownModelError,
    UnknownOutcomeError as UnknownOutcomeError,
    UnsupportedEndpointError as UnsupportedEndpointError,
    UpstreamError as UpstreamError,
)
