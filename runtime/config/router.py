"""The configuration of the choice among instances. Only shape, bounds and meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import Seconds, Section, Tokens, about

_Weight = Annotated[float, Meta(ge=0, le=1000)]


class RouterKvConfig(Section, frozen=True, kw_only=True):
    """How `router.policy: kv` chooses; other policies ignore it."""

    overlap_credit: Annotated[
        _Weight, about("Blocks of prefill that are saved by each block that an instance holds.")
    ] = 1.0
    overlap_credit_decay: Annotated[
        _Weight,
        about("How much less a held block saves where more prefill waits; 0: not less."),
    ] = 0.0
    prefill_load_scale: Annotated[
        _Weight, about("What a block of prefill counts beside a block in use by a sequence.")
    ] = 1.0
    active_request_weight: Annotated[
        _Weight, about("Blocks that each request under way counts for.")
    ] = 0.0
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)],
        about("0: the cheapest instance; above, dearer ones too, the more the higher."),
    ] = 0.0
    events: Annotated[
        bool,
        about(
            "Workers tell which KV blocks they hold, whatever their policy. `false`: a router assumes"
            " that an instance holds what it was sent within `ttl_s`."
        ),
    ] = True
    ttl_s: Annotated[
        Seconds,
        about(
            "How long a prompt is assumed to be held where nobody tells: without `events`, and for"
            " models whose tokens the frontend cannot make."
        ),
    ] = 120.0
    sync: Annotated[
        bool,
        about("Routers of one endpoint tell each other what they send, so that loads add up."),
    ] = True


class RouterConfig(Section, frozen=True, kw_only=True):
    """Which instance gets a request."""

    policy: Annotated[
        Literal["round_robin", "random", "direct", "least_loaded", "power_of_two", "kv"],
        about(
            "`power_of_two` draws two and takes the less loaded. `direct` serves requests that name"
            " their instance and refuses others. `kv` weighs the KV blocks of a prompt that each"
            " instance holds against how busy it is. Workers without a prefix cache tell their load if"
            " they are given the same."
        ),
    ] = "round_robin"
    inhibit_s: Annotated[
        Seconds,
        about(
            "An instance that failed is not chosen this long while others live; then one request"
            " tries it. Each further failure doubles the time, up to a minute."
        ),
    ] = 5.0
    errors_max: Annotated[
        Annotated[int, Meta(ge=1, le=1000)],
        about(
            "An upstream that answers so many requests in a row with an error of its own (500, 502,"
            " 504) has failed. One that dies, stalls or sends nonsense has failed at once."
        ),
    ] = 3
    attempts_max: Annotated[
        Annotated[int, Meta(ge=1, le=32)],
        about("Instances tried for one request before its first item."),
    ] = 3
    wait_s: Annotated[
        Annotated[float, Meta(ge=0, le=86_400, extra={"unit": "s"})],
        about(
            "Where no instance is there, a model's request that has no answer yet, or whose answer"
            " is to be replayed, waits this long for one; then it is a 503, or ends with an error."
        ),
    ] = 10.0
    migrations_max: Annotated[
        Annotated[int, Meta(ge=0, le=32)],
        about(
            "How often an answer whose worker is lost, or leaves, is replayed at another behind the"
            " tokens that the client has. 0: it ends with an error."
        ),
    ] = 3
    migration_tokens_max: Annotated[
        Tokens, about("A longer sequence, prompt and answer together, is not replayed.")
    ] = 131_072
    silence_grace_s: Annotated[
        Seconds,
        about(
            "A request that brings nothing this long is given up if its worker left discovery; if"
            " not, the worker is asked, and given up after as long without an answer. At least"
            " `lease_ttl_s`: a worker takes half of it to register again."
        ),
    ] = 10.0
    stale_grace_s: Annotated[
        Seconds | None,
        about(
            "A worker that discovery deleted, but that answers over its standing connection, is"
            " kept this long with its models. Longer than it takes to register again: half of"
            " `lease_ttl_s`. `null` drops it at once."
        ),
    ] = 10.0
    kv: RouterKvConfig = RouterKvConfig()
