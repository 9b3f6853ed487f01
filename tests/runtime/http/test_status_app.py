"""The workers' status port."""

from __future__ import annotations

import httpx
import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.app import HealthAnswer, build_status_app
from trinamo.runtime.traces.ring import Traces
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.http.server import Server


async def test_it_tells_health_life_metrics_and_traces() -> None:
    env = RealEnv()
    metrics, traces = WorkerMetrics(env), Traces(env.clock, 10, instance="7")
    traces.begin("r-1").begin("worker", endpoint="a/b/c").finish()
    metrics.counts("lease_state", "The lease", "state", may_fall=True).tally("granted").value = 1
    health = HealthAnswer("ready", {"instance": "7"})
    app = build_status_app(metrics, traces, lambda: health)
    server = Server(app, HttpConfig(port=0), metrics=metrics, rng=env.rng)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120
        ) as http:
            assert (await http.get("/health")).json() == {"status": "ready", "instance": "7"}
            assert (await http.get("/live")).status_code == 200
            assert 'trinamo_lease_state{state="granted"} 1.0' in (await http.get("/metrics")).text
            assert (await http.get("/traces")).json() == {"request_ids": ["r-1"]}
            told = (await http.get("/traces/r-1")).json()
            assert told["process"] == {"instance": "7"}
            assert told["traces"][0]["legs"][0]["facts"] == {
                "endpoint": "a/b/c",
                "outcome": "success",
            }
            assert (await http.get("/traces/other")).json()["traces"] == []
            health = HealthAnswer("draining")
            answer = await http.get("/health")
            assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
            assert (await http.get("/v1/models")).json()["error"]["code"] == "path_not_found"
        server.close()
