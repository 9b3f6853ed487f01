"""The official OpenAI client against a running cluster: whole and streamed.

    trinamo up                          # in one terminal
    python examples/chat.py             # in another
    python examples/chat.py http://127.0.0.1:8080/v1 "Name three colours."

Needs the client: pip install openai. Nothing in it is particular to trinamo but the address.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str, question: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    print("model:", model)

    whole = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=64
    )
    print("whole:", whole.choices[0].message.content)

    print("streamed: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        arguments[0] if arguments else "http://127.0.0.1:8787/v1",
        arguments[1] if len(arguments) > 1 else "Say hello in five words.",
    )
