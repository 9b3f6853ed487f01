"""LiteLLM's proxy in front, and the SDKs of OpenAI and Anthropic behind it."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import openai
from checks import BASE, KEY, LONG, MODEL, SHORT, must_raise, tried

START_S = 120
MASTER_KEY = f"sk-{secrets.token_hex(32)}"
CONFIG = f"""
model_list:
  - model_name: small
    litellm_params:
      model: openai/{MODEL}
      api_base: {BASE}
      api_key: {KEY}
"""


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def wait_until_it_answers(proxy: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(START_S * 5):
        assert proxy.poll() is None, log.read_text()[-500:]
        try:
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"it did not answer in {START_S} s")


def ask(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=MASTER_KEY, max_retries=0, timeout=60)
    chat = client.chat.completions
    steady = {"model": "small", "messages": SHORT, "temperature": 0, "max_tokens": 12}

    with tried("chat"):
        assert chat.create(**steady).choices[0].message.content
    with tried("chat, streamed"):
        events = chat.create(**steady, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in events if each.choices)
    with tried("embeddings, which the model may lack"), suppress(openai.BadRequestError):
        client.embeddings.create(model="small", input="a")
    with tried("the model is there for others all the same"):
        assert chat.create(**steady).choices[0].message.content
    with tried("n = 2"):
        assert len(chat.create(**steady, n=2).choices) == 2
    with tried("responses"):
        found = client.responses.create(model="small", input="Say hello.", max_output_tokens=16)
        assert found.output_text
    with tried("a prompt that is too long"):
        long = {**steady, "messages": [{"role": "user", "content": LONG}]}
        error = must_raise(openai.BadRequestError, chat.create, **long)
        assert "ContextWindowExceededError" in str(error), error
    with tried("messages, by way of responses"):
        body = b'{"model":"small","max_tokens":12,"messages":[{"role":"user","content":"Hello."}]}'
        headers = {"content-type": "application/json", "authorization": f"Bearer {MASTER_KEY}"}
        asked = urllib.request.Request(f"{url}/v1/messages", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert b'"text"' in answer.read()
    with tried("after all that chat goes on"):
        assert chat.create(**steady).choices[0].message.content


def main() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        log = Path(folder) / "log"
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as output:
            own = {"LITELLM_MASTER_KEY": MASTER_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            proxy = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **own}
            )
        try:
            with tried("it starts"):
                wait_until_it_answers(proxy, f"http://127.0.0.1:{port}", log)
            ask(f"http://127.0.0.1:{port}")
        finally:
            proxy.terminate()
            proxy.wait()


main()
