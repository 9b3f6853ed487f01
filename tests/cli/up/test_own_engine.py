"""An engine of a stranger's own, from an empty folder: ten lines, `trinamo up`, OpenAI's client."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from tests.cli.places import Place, RunningCluster, cluster, unknown_model, wait_for

MINE = """\
import trinamo

@trinamo.engine(name="parrot", context_tokens_max=1024)
async def engine(request, context, *, mark: str = "."):
    for word in request.text.split():
        if word == "raise":
            raise ValueError("a secret")
        yield word.upper() + " "
    yield mark
"""


@pytest.fixture(scope="module")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One worker with the engine of the folder; the tests leave it as it was."""
    place = Place(tmp_path_factory.mktemp("own"))
    (place.root / "mine.py").write_text(MINE)
    engine = ("--engine", "./mine.py:engine", "--engine-arg", "mark=!")
    with cluster(place, *engine, "--workers", "1") as running:
        yield running


@pytest.fixture
def client(parrots: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parrots.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_the_engine_has_ten_lines_at_most() -> None:
    assert len(MINE.splitlines()) <= 10


def test_openai_s_client_is_answered_by_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "polly wants a token"}]
    )

    assert answer.choices[0].message.content == "POLLY WANTS A TOKEN !"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)
    assert [model.id for model in client.models.list()] == ["parrot"]


def test_a_stream_of_it_is_a_chunk_an_item(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "a b c"}], stream=True, max_tokens=2
    ) as chunks:
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]

    assert "".join(text or "" for text in texts) == "A B "


def test_what_it_raises_is_told_to_the_operator_and_not_to_the_client(
    client: openai.OpenAI, parrots: RunningCluster
) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="parrot", prompt="please raise")

    assert failed.value.code == "engine"
    assert "secret" not in json.dumps(failed.value.body)
    sentence = "engine parrot raised ValueError: a secret (mine.py:7, in engine)"
    wait_for(lambda: sentence in parrots.place.output, 120, "the operator's sentence")
    assert client.completions.create(model="parrot", prompt="on").choices[0].text == "ON !"


def test_a_worker_beside_it_joins_by_itself(client: openai.OpenAI, parrots: RunningCluster) -> None:
    """The command is the one that `up` has printed."""
    place = parrots.place
    printed = next(line for line in place.output.splitlines() if "trinamo worker" in line)
    words = shlex.split(printed.split("trinamo worker ")[1])
    other = place.start("worker", *words, "--model-name", "second")
    try:
        wait_for(lambda: "second" in [model.id for model in client.models.list()], 120, "its model")
        answer = client.completions.create(model="second", prompt="hello")
        assert answer.choices[0].text == "HELLO !"
    finally:
        other.send_signal(signal.SIGTERM)
        assert other.wait(30) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_thing", "does not import: ModuleNotFoundError"),
        ("engine = 4", "is no engine, but int"),
    ],
)
def test_an_engine_that_cannot_start_ends_up_with_a_sentence(
    code: str, words: str, parrots: RunningCluster
) -> None:
    """As a worker beside a cluster that lives on."""
    place = parrots.place
    (place.root / "bad.py").write_text(code)

    done = place.run("worker", "--engine", "bad:engine")

    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert parrots.process.poll() is None


CALLER = """\
import trinamo, trio

async def main():
    async with trinamo.connect() as cluster:
        print(cluster.models())
        print(await cluster.answer("a b c", max_tokens=2, model="parrot"))
        async with cluster.generate("a b c") as deltas:
            async for delta in deltas:
                print(delta.text)
                break
        try:
            await cluster.answer("raise")
        except trinamo.EngineError:
            print("typed")
        try:
            await cluster.answer("a", model="nobody")
        except trinamo.ModelNotFoundError as error:
            print(error)
        client = await cluster.client("trinamo/backend/generate")
        print(len(client.router.instances))

trio.run(main)
"""


def test_a_program_that_connects_finds_the_cluster_by_itself(parrots: RunningCluster) -> None:
    place = parrots.place
    (place.root / "call.py").write_text(CALLER)

    done = subprocess.run(
        [sys.executable, "-W", "error", "call.py"],
        cwd=place.root,
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.splitlines() == [
        "['parrot']",
        "A B ",
        "A ",
        "typed",
        unknown_model("nobody", "parrot"),
        "1",
    ], done.stderr
