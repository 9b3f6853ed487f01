"""The configuration of the HTTP frontend. Only shape, bounds and meaning; nothing here reads or listens."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import (
    Bytes,
    Count,
    FrameBytes,
    Port,
    Seconds,
    Section,
    Text,
    Tokens,
    about,
    is_loopback,
    need_together,
)

Origin = Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]{0,31}://[^/\s*,]{1,255})$")]
_NO_IDS = frozenset(
    {"authorization", "cookie", "connection", "content-length", "content-type", "transfer-encoding"}
)
HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


class HttpTlsConfig(Section, frozen=True, kw_only=True):
    """TLS towards clients; with it, HTTP/2 is spoken to those who want it."""

    certificate_file: Annotated[
        Text | None,
        about("Our certificate and the chain behind it, as PEM; null: no TLS. Needs `key_file`."),
    ] = None
    key_file: Annotated[
        Text | None, about("The key of `certificate_file`, which nobody else should read.")
    ] = None
    client_ca_file: Annotated[
        Text | None,
        about("Who may sign clients' certificates, which every client then needs; null: none."),
    ] = None
    minimum_version: Annotated[
        Literal["1.2", "1.3"], about("The oldest version of TLS that is spoken.")
    ] = "1.2"
    handshake_timeout_s: Annotated[Seconds, about("For a client's whole handshake.")] = 10.0
    renewal_interval_s: Annotated[
        Seconds,
        about(
            "How often the files are looked at. Changed ones serve every handshake from then on,"
            " without a restart; broken ones are told in the log, and the old ones go on."
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        need_together("tls", certificate_file=self.certificate_file, key_file=self.key_file)
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("tls: client_ca_file is set, but certificate_file is null")


class HttpConfig(Section, frozen=True, kw_only=True):
    """The HTTP frontend."""

    host: Annotated[
        Text, about("Address to bind; IPv6 without brackets. `::`: all, of both families.")
    ] = "127.0.0.1"
    port: Annotated[Port, about("Port to bind; 0: the system chooses.")] = 8787
    reuse_port: Annotated[
        bool,
        about(
            "Share the port with other frontends of this user on this machine, among which the"
            " kernel spreads connections, and which have it alone when one of them leaves;"
            " `trinamo frontend --processes` sets it."
        ),
    ] = False
    status_host: Annotated[
        Text, about("Address of the status port (`/health`, `/live`, `/metrics`).")
    ] = "127.0.0.1"
    status_port: Annotated[
        Port | None,
        about("A port for the status of this very process; 0: the system chooses; null: none."),
    ] = None
    server: Annotated[
        Literal["native", "hypercorn"],
        about(
            "Who speaks HTTP: our own listener, or hypercorn, for a second opinion on loopback: slower,"
            " HTTP/1.1 in clear text only, and without most bounds of this section."
        ),
    ] = "native"
    tls: HttpTlsConfig = HttpTlsConfig()
    dashboard: Annotated[
        bool | None,
        about(
            "Show the cluster as a page at `/dashboard`. It tells names, addresses and figures to"
            " whoever may ask. null: on the status port, and here while `http.host` is loopback and"
            " nobody needs a key; true: here too, without a key, whatever the address; false: nowhere."
        ),
    ] = None
    enable_chat_endpoints: Annotated[
        bool, about("Serve chats: `/v1/chat/completions`, `/v1/responses`, `/v1/messages`.")
    ] = True
    enable_cmpl_endpoints: Annotated[bool, about("Serve `/v1/completions`.")] = True
    unknown_fields: Annotated[
        Literal["refuse", "warn", "ignore"],
        about(
            "What becomes of a request with fields that nobody knows (`docs/fields.md`): a 400 that names"
            " them; or the answer, which names them in `X-Trinamo-Unknown-Fields` as the log does; or just"
            " the answer. Models that pass requests through get them all."
        ),
    ] = "warn"
    server_tools: Annotated[
        Literal["drop", "refuse"],
        about(
            "What becomes of tools that other servers run (`web_search`, `local_shell`, `custom`, …) beside a"
            " request's functions: they are left out, and the answer names them in `X-Trinamo-Dropped-Tools`; or"
            " the request is a 400. One without any function is a 400."
        ),
    ] = "drop"
    on_disconnect: Annotated[
        Literal["kill", "stop"],
        about("What a client that leaves does to its request: end it now, or let it finish soon."),
    ] = "kill"
    body_bytes_max: Annotated[FrameBytes, about("A larger request body is a 413.")] = 4 << 20
    embedding_inputs_max: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)],
        about(
            "Inputs of one request for embeddings, which are done as places are free; more are a 400."
            " `body_bytes_max` bounds their tokens in all."
        ),
    ] = 2048
    bodies_bytes_max: Annotated[
        Bytes,
        about(
            "Bytes of request bodies held at once, beyond the first 64 KiB of each; one more is a"
            " 503: for the oldest that is still on its way, of the address or key that sends most, or"
            " if there is none, for itself. Copies of a prompt that the choices of one body send to"
            " workers count, too, and take half at most: without room these go one after the other."
        ),
    ] = 256 << 20
    answer_bytes_max: Annotated[
        Bytes,
        about("Of one answer that is not streamed, as it is kept; a longer one is a 500."),
    ] = 64 << 20
    answers_bytes_max: Annotated[
        Bytes,
        about(
            "Of all of them at once, beyond the first 64 KiB of each; what does not fit is a 503."
        ),
    ] = 256 << 20
    bodies_max: Annotated[
        Count,
        about(
            "Request bodies that may be on their way at once, 64 KiB of a longer one counting as one"
            " more; one too many is a 503 for the oldest of the address or key that sends most. Only"
            " whole ones count as `requests_max`."
        ),
    ] = 4096
    body_timeout_s: Annotated[Seconds, about("For the whole request body to arrive.")] = 30.0
    header_bytes_max: Annotated[FrameBytes, about("A larger request head ends the connection.")] = (
        32_768
    )
    backlog_bytes_max: Annotated[
        Bytes, about("Answer bytes a slow client may leave unread before its stream waits.")
    ] = 65_536
    backlogs_bytes_max: Annotated[
        Bytes,
        about(
            "Answer bytes that all slow clients together may leave unread, 16 KiB counted for each"
            " stream of HTTP/2 besides; beyond it the address that leaves most loses the oldest of its"
            " connections or streams. Not by hypercorn."
        ),
    ] = 128 << 20
    requests_max: Annotated[
        Count, about("Requests at once; one more waits (`queue_max`) or is a 503.")
    ] = 4096
    queue_max: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)],
        about(
            "How many requests may wait while `requests_max` are under way, or all workers of their"
            " model are busy, full or away. Places go to keys in turn, to addresses where there are"
            " none. `bodies_bytes_max` bounds their bodies. 0: none waits, it is a 503 at once."
        ),
    ] = 1000
    queue_timeout_s: Annotated[
        Seconds, about("How long each of them may wait before it is a 503.")
    ] = 60.0
    rate_per_s: Annotated[
        Annotated[float, Meta(ge=1e-6, le=1_000_000)] | None,
        about(
            "Requests for models a second, in the long run, of each key, or of each address where"
            " there are no keys; one more is a 429. Of each process. null: no bound."
        ),
    ] = None
    rate_burst: Annotated[
        Count | None,
        about(
            "So many of them may come at once, when few have come before. null: as many as come in"
            " a second, and one at least."
        ),
    ] = None
    busy_blocks: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about(
            "A worker with this fraction of its KV blocks in use is busy; while all that could answer"
            " are, requests wait (`queue_max`) or are a 503. null: no bound. Workers must be told"
            " it, too."
        ),
    ] = None
    busy_waiting_tokens: Annotated[
        Tokens | None,
        about("Likewise a worker in which so many prompt tokens wait to be computed."),
    ] = None
    connections_max: Annotated[
        Count,
        about("Open connections at once; one more takes the place of the one idle longest."),
    ] = 2048
    upstreams: Annotated[
        Annotated[tuple[Text, ...], Meta(max_length=256)],
        about(
            "OpenAI-compatible servers that this frontend asks itself, without workers, etcd or NATS;"
            " `worker.upstream` says the rest of them. `trinamo frontend --upstream`."
        ),
    ] = ()
    api_keys_file: Annotated[
        Text | None,
        about(
            "A file of keys, one a line, each with or without a name before it (`alice: KEY`), one of"
            " which each request needs as `Authorization: Bearer`, but for `/health` and `/live`. What"
            " tells of all clients (`/metrics`, `/status`, `/traces`, `/sd`) needs an operator's (`alice"
            " (operator): KEY`). A changed file counts within seconds. null: nobody needs a key."
        ),
    ] = None
    api_key_env: Annotated[
        Text | None,
        about("The environment variable that holds an operator's key, beside the file's."),
    ] = None
    cors_origins: Annotated[
        Annotated[tuple[Origin, ...], Meta(max_length=256)],
        about(
            "Origins, such as `https://chat.example.com`, whose pages a browser lets ask `/v1/…` and read"
            " the answers; `*`: any page's."
        ),
    ] = ()
    request_id_headers: Annotated[
        Annotated[tuple[HeaderName, ...], Meta(max_length=8)],
        about(
            "Headers that may hold a request's id; the first that does, gives it. Those that a request"
            " has come back with the id in the answer, as `X-Request-Id` always does."
        ),
    ] = ("x-request-id",)
    hosts: Annotated[
        tuple[Text, ...] | None,
        about(
            "Names by which clients call it, in the Host header; another is a 421. Addresses,"
            " `localhost` and `http.host` always are; `*`: any. `null`: none more on loopback, so"
            " that no page of the web reads its answers by DNS rebinding, and any elsewhere."
        ),
    ] = None
    keep_alive_s: Annotated[
        Seconds,
        about(
            "For the next request's head on an idle connection; longer than a balancer in front keeps"
            " one, which is 60 s for most, so that none is closed as its next request comes."
        ),
    ] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        about(
            "A client that does not take a piece of its answer (64 KiB) within this time, or whose"
            " machine does not acknowledge one, is cut off."
        ),
    ] = 20.0
    comment_interval_s: Annotated[
        Annotated[float, Meta(ge=0, le=3600, extra={"unit": "s"})],
        about(
            "A streaming client to which nothing was sent for this long, since its prompt waits or is computed, is"
            " sent a comment of the event stream, so that no proxy between takes the connection for dead. 0: never."
        ),
    ] = 15.0
    peer_timeout_s: Annotated[
        Seconds,
        about(
            "A client to which nothing is under way, and whose machine does not answer, is gone."
        ),
    ] = 20.0
    answer_timeout_s: Annotated[
        Seconds | None,
        about(
            "From a request's arrival to the end of its answer, all workers, queues and replays"
            " included; later it is a 504, or ends as an event. A client may ask for less in"
            " `X-Trinamo-Timeout`. null: no bound."
        ),
    ] = None
    engine_error_detail: Annotated[
        bool,
        about(
            "Tell clients the text of a failed engine, or of a failed connection in the cluster;"
            " false: a sentence and the id of the request, whose text the log has."
        ),
    ] = False
    lame_duck_s: Annotated[
        Annotated[float, Meta(ge=0, le=3600, extra={"unit": "s"})],
        about(
            "At the end, before all else: how long requests are still taken while `/health` is 503, so that"
            " load balancers notice."
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        Seconds, about("At the end: how long streams may go on before they are stopped.")
    ] = 30.0
    stop_grace_s: Annotated[Seconds, about("From Stop until it becomes Kill.")] = 5.0

    def __post_init__(self) -> None:
        taken = _NO_IDS.intersection(map(str.lower, self.request_id_headers))
        if taken:
            raise ValueError(f"http.request_id_headers: {', '.join(sorted(taken))} holds no id")
        if self.server == "hypercorn" and self.tls.certificate_file is not None:
            raise ValueError("http.server: hypercorn speaks no TLS here; our own listener does")
        if self.server == "hypercorn" and not is_loopback(self.host):
            raise ValueError(
                f"http.server: hypercorn serves loopback only, and http.host is {self.host}: it has no"
                " bound for clients that are slow, or many; our own listener has"
            )

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return self.api_keys_file is not None or self.api_key_env is not None

    @property
    def sheds_load(self) -> bool:
        """Whether what workers report decides who gets in, so that they must report."""
        return self.busy_blocks is not None or self.busy_waiting_tokens is not None

    @property
    def scheme(self) -> str:
        """Of its URLs."""
        return "http" if self.tls.certificate_file is None else "https"
