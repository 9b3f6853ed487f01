"""The HTTP service as an object: build it, give it models, run it in a nursery, stop it.

    python examples/http_service.py

Any object with `generate` answers for a model, here one that echoes. `trinamo frontend` does the same with
engines that ask the workers of a cluster, and a watch on their models calls the manager.
"""

from __future__ import annotations

import json
import urllib.request

import trio

from trinamo import HttpService, ModelAlreadyExistsError, open_echo_engine


def ask(port: int, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, object] = json.load(answer)
        return found


async def main() -> None:
    service = (
        HttpService.builder()
        .port(0)
        .host("127.0.0.1")
        .enable_chat_endpoints(True)
        .enable_cmpl_endpoints(False)
        .build()
    )
    manager = service.model_manager()
    async with open_echo_engine(model="llama-3-70b") as engine:
        manager.add_chat_completions_model("llama-3-70b", engine)
        manager.add_completions_model("codellama-34b", engine)
        try:
            manager.add_chat_completions_model("llama-3-70b", engine)
        except ModelAlreadyExistsError as error:
            print("refused:", error)
        print("chats:", *manager.list_chat_completions_models())
        print("completions:", *manager.list_completions_models())

        async with trio.open_nursery() as nursery:
            # Or, to wait here until it has stopped: `await service.run()`.
            port = await service.spawn(nursery)
            chat = {"messages": [{"role": "user", "content": "A nursery for every task."}]}
            answer = await trio.to_thread.run_sync(ask, port, "/v1/chat/completions", chat)
            print(answer["model"], "says:", answer["choices"][0]["message"]["content"])  # type: ignore[index]
            manager.remove_chat_completions_model("llama-3-70b")
            print("any:", manager.has_model_any("llama-3-70b"))
            service.stop()


if __name__ == "__main__":
    trio.run(main)
