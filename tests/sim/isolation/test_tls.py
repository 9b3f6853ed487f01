"""TLS in a run: OpenSSL's dice and its tickets' time come from the seed, and are its own afterwards."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from tests.sim.programs import tls_echo
from trinamo.sim import SeedChoices, World
from trinamo.sim.explore import Scenario, check_determinism, run
from trinamo.sim.isolation import tls


@pytest.fixture(scope="module", params=["ECDSA", "RSA"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the certificates are; an RSA key keeps what it drew for several signatures."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    key_type = trustme.KeyType[request.param]
    authority = trustme.CA(key_type=key_type)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    server = authority.issue_cert("server", key_type=key_type)
    server.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    return {"authority": str(folder / "authority.pem"), "server": str(folder / "server.pem")}


@pytest.mark.parametrize("is_kept", [False, True])
def test_tls_replays(files: dict[str, str], *, is_kept: bool) -> None:
    digests = [
        [tls_echo.run(SeedChoices(seed), **files, is_kept=is_kept).trace.digest for _ in range(2)]
        for seed in range(5)
    ]

    assert all(first == again for first, again in digests)
    assert len({first for first, _ in digests}) == 5


@pytest.mark.check
def test_tls_replays_in_new_processes(files: dict[str, str]) -> None:
    scenario = Scenario("tests.sim.programs.tls_echo", parameters={**files, "is_kept": True})

    assert check_determinism(scenario, [1, 2]).differences == []


def test_tickets_hold_the_time_of_the_run(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would differ from one in the next second of the machine's clock."""
    stamped: list[int] = []
    library = tls.openssl()
    assert library is not None
    real = library._set_time

    def set_time(session: int, at_s: int) -> None:
        stamped.append(at_s)
        real(session, at_s)

    monkeypatch.setattr(library, "_set_time", set_time)
    tls_echo.run(SeedChoices(1), **files, is_kept=False)

    assert set(stamped) == {1_700_000_000}
    assert len(stamped) == 8, "two for each of four connections"


def test_openssl_draws_for_itself_after_a_run_also_after_one_that_failed() -> None:
    library = tls.openssl()
    assert library is not None
    before, drawn = library.method, []

    async def fails() -> None:
        drawn.append(ssl.RAND_bytes(8))
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            World(SeedChoices(1)).run(fails)
        assert library.method == before != library.own_method

    assert drawn[0] == drawn[1] != ssl.RAND_bytes(8)


def test_a_library_that_offers_no_seam_is_said_to_replay_nothing(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "openssl", lambda: None)

    played = run(Scenario("tests.sim.programs.tls_echo", parameters={**files}), 1)

    assert played.finding is None
    assert played.hints == (tls.NO_SEAM,)


def test_runs_without_tls_draw_no_dice_for_it() -> None:
    world = World(SeedChoices(1))
    world.run(trio.lowlevel.checkpoint)

    assert "tls" not in world.choices.drawn()
