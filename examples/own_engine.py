"""An engine of your own, and OpenAI's HTTP API in front of it, in one process.

    python examples/own_engine.py
    curl http://127.0.0.1:8787/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "polly wants a token"}'

It yields text; tokens, stop strings and the end of the answer are filled in. The same file serves
in a cluster: `trinamo up --engine examples/own_engine.py:parrot`. See docs/write_a_worker.md.
"""

import trio

import trinamo


@trinamo.engine(name="parrot", context_tokens_max=1024)
async def parrot(request, context):
    for word in request.text.split():
        await trio.sleep(0.01)  # Where a model would compute.
        yield word.upper() + " "


if __name__ == "__main__":
    trinamo.run(parrot)
