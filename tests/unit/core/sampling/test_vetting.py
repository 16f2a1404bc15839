"""Vetting: a process of its own says which grammars can be compiled, and ends those that take too much."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import psutil
import pytest
import uvloop

from triforce_core.errors import InvalidValueError
from triforce_core.models.files import load_tokenizer
from triforce_core.sampling.guides import Guide
from triforce_core.sampling.vetting import CPU_S, MEMORY_MIB, TOO_LARGE, Vetting

SMALL = Guide("regex", "[a-z]+").grammar()
# As a client's grammar in llguidance's own form may have it: schemas are checked before.
ENDLESS = "start: %json " + json.dumps({"multipleOf": 999983})


@pytest.fixture
def vetting() -> Vetting:
    return Vetting(lambda: load_tokenizer("demo"), 4096)


def test_its_verdict_is_the_librarys(vetting: Vetting) -> None:
    wrong = Guide("regex", "(a").grammar()
    large = Guide("regex", "(((a{1000}){1000}){1000}){1000}").grammar()

    async def verdicts() -> list[str]:
        return [await vetting.error(grammar) for grammar in (SMALL, wrong, large, SMALL)]

    first, second, third, again = asyncio.run(verdicts())
    assert first == again == ""
    assert "unclosed group" in second
    assert "too many expressions" in third


def test_what_takes_too_long_is_ended_and_nobody_waits_for_it(vetting: Vetting) -> None:
    grammar = Guide("grammar", ENDLESS).grammar()

    async def both() -> tuple[str, bool, str]:
        await vetting.error(SMALL)
        endless = asyncio.create_task(vetting.error(grammar))
        quick = await vetting.error(Guide("regex", "[0-9]+").grammar())
        return quick, endless.done(), await endless

    assert asyncio.run(both()) == ("", False, TOO_LARGE)
    process = vetting.process
    assert asyncio.run(vetting.error(grammar)) == TOO_LARGE, "the verdict is kept"
    assert vetting.process is process
    assert process is not None
    assert process.poll() is None, "only the grammar's own process was ended"


def test_each_grammar_has_its_own_limits(vetting: Vetting) -> None:
    async def limits() -> None:
        endless = asyncio.create_task(vetting.error(Guide("grammar", ENDLESS).grammar()))
        while not (vetting.process and (children := psutil.Process(vetting.process.pid).children())):
            await asyncio.sleep(0.01)
        while children[0].rlimit(psutil.RLIMIT_AS)[0] == psutil.RLIM_INFINITY:  # set last
            await asyncio.sleep(0.01)
        assert children[0].rlimit(psutil.RLIMIT_CPU) == (CPU_S, CPU_S)
        room = children[0].rlimit(psutil.RLIMIT_AS)[0] - psutil.Process(vetting.process.pid).memory_info().vms
        assert 0 < room <= (MEMORY_MIB + 16) << 20
        await endless

    asyncio.run(asyncio.wait_for(limits(), 60))


def test_the_event_loop_of_the_server_reaches_it(vetting: Vetting) -> None:
    """Serve's is uvloop's."""
    assert uvloop.run(vetting.error(SMALL)) == ""


def test_its_process_is_started_again(vetting: Vetting) -> None:
    asyncio.run(vetting.error(SMALL))
    assert vetting.process is not None
    vetting.process.kill()
    vetting.process.wait()
    assert asyncio.run(vetting.error(Guide("regex", "[0-9]+").grammar())) == ""


def test_a_slow_tokenizer_is_refused_by_name() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(InvalidValueError, match=r"^grammar: 'Slow' needs a fast tokenizer"):
        asyncio.run(Vetting(Slow, 4096).error(SMALL))


PYTHON = "/usr/bin/python3"  # of the system: another user may not read ours
ASK = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1].replace("@", chr(0)))
    try:
        asked.sendall(sys.argv[2].encode())
        asked.shutdown(socket.SHUT_WR)
        print(asked.recv(1000))
    except ConnectionError:  # closed before all was sent
        print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists(PYTHON), reason="needs root, who can be another user")
def test_other_users_get_no_answer_and_no_file_stays(vetting: Vetting) -> None:
    asyncio.run(vetting.error(SMALL))
    assert vetting.address.startswith("\0"), "no file"
    for user, answer in ((0, b"b'\"\"'\n"), (65534, b"b''\n")):
        ask = [PYTHON, "-c", ASK, vetting.address.replace("\0", "@"), SMALL, str(user)]
        # Not `user=user`, for which Python would fork, and gRPC's threads of other tests may end a fork.
        said = subprocess.run(ask, capture_output=True, check=False, cwd="/")
        assert (said.stdout, said.stderr) == (answer, b"")
