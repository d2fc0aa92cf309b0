"""The command line: what it refuses and how it says so; the real process; what it may import."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from pd_router import cli
from pd_router.config import RouterConfig
from tests.cluster import READY_DEADLINE_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

D = "http://127.0.0.1:9"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(flags)


def test_flags_become_the_config() -> None:
    flags = "--prefill http://a:1 http://b:2 --decode http://c:3 --decode http://d:4/x --route d-first"
    config = cli.config_from(parse(*flags.split()))
    assert config == RouterConfig(
        prefill=("http://a:1", "http://b:2"), decode=("http://c:3", "http://d:4/x"), route="d-first"
    )


def test_two_parsings_share_nothing() -> None:
    assert cli.config_from(parse("--decode", D)).decode == cli.config_from(parse("--decode", D)).decode == (D,)


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ([], "--decode URL or --mixed URL"),
        (["--prefill", "http://a:1"], "--decode URL or --mixed URL"),
        (["--decode", "a:1"], "http://host:port"),
        (["--decode", D, "--head-timeout-s", "0"], "--head-timeout-s must be above 0"),
        (["--decode", D, "--max-connections", "0"], "--max-connections must be at least 1"),
        (["--decode", "http://"], "http://host:port"),
        (["--decode", "http://a:99999"], "bad node URL"),
        (["--decode", "http://a..b:1"], "bad node URL"),
        (["--decode", f"http://{'a' * 64}:1"], "bad node URL"),
        (["--decode", "http://a\\b:1"], "bad node URL"),
        (["--decode", "http://a:1?x=1"], "bad node URL"),
        (["--decode", "http://a:1", "--mixed", "http://a:1/"], "given twice"),
        (["--nodes-file", "/nonexistent/nodes.json"], "--nodes-file"),
        (["--decode", D, "--max-node-deaths", "0"], "--max-node-deaths"),
        (["--decode", D, "--cluster-key-file", "/nonexistent/key"], "cluster key"),
        (["--decode", D, "--api-keys", "/nonexistent/keys"], "--api-keys /nonexistent/keys: "),
        (["--decode", D, "--tls-cert", "/nonexistent/cert"], "cannot use --tls-cert /nonexistent/cert"),
        (["--decode", D, "--tls-key", "/nonexistent/key"], "--tls-key needs --tls-cert"),
        (["--decode", D, "--tls-ca", "/nonexistent/ca"], "cannot use --tls-ca /nonexistent/ca"),
        (["--decode", D, "--max-queue-s", "0"], "--max-queue-s must be above 0"),
        (["--decode", D, "--port", "70000"], "--port must be at most 65535, not 70000"),
        (["--decode", D, "--port", "-1"], "--port must be at least 0, not -1"),
        (["--decode", D, "--port", "9" * 400], "--port must be at most 65535"),
        (["--decode", D, "--health-interval-s", "0"], "--health-interval-s must be above 0"),
        (["--decode", D, "--drain-s", "nan"], "--drain-s nan is not a finite number"),
        (["--decode", D, "--listen-fd", "99999"], "--listen-fd 99999: "),
        (["--decode", D, "--listen-fd", "0"], "--listen-fd 0: "),
        (["--decode", D, "--host", "256.0.0.1", "--port", "0"], "cannot resolve --host 256.0.0.1"),
    ],
)
def test_a_wrong_flag_says_what_to_do(flags: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(parse(*flags)) == 2
    said = capsys.readouterr().err
    assert hint in said
    assert said.count("\n") == 1


def test_a_taken_port_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(parse("--decode", D, "--port", str(port))) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


@pytest.mark.long
def test_the_router_starts_without_torch() -> None:
    """Blocks what the router must not need, then imports all of it and asks for help."""
    blocked = ("torch", "transformers", "numpy", "zmq", "pd_cluster", "pd_kernels", "pd_connectors.base")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import importlib, pkgutil, pd_router\n"
        "names = [m.name for m in pkgutil.walk_packages(pd_router.__path__, 'pd_router.')]\n"
        "for name in names: name.endswith('__main__') or importlib.import_module(name)\n"
        "assert len(names) > 10\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=READY_DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@contextlib.asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`python -m pd_router`, and the address that it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pd_router", "--port", "0", *flags,
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"PD_CLUSTER_KEY": "test"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode()
        assert line.startswith("router ready on http://127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.anyio
@pytest.mark.integration
async def test_the_process_serves_and_ends_in_order() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), router_process("--prefill", p.url, "--decode", d.url) as (process, url):
        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": "x", "stream": True}
            async with session.post(url + "/v1/completions", json=body) as answer:
                assert await answer.content.readany() == fakes.chunk("a")
                process.send_signal(signal.SIGTERM)  # a running request is seen through
                d.go_on.set()
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


@pytest.mark.anyio
@pytest.mark.integration
async def test_the_process_sees_nodes_come_and_go() -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d), router_process("--decode", d.url, "--health-interval-s", "0.02") as (_, url):

        async def until_health(status: int) -> None:
            async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
                while True:
                    async with session.get(url + "/health") as answer:
                        if answer.status == status:
                            return

        await until_health(200)
        d.is_up = False
        await until_health(503)
        d.is_up = True
        d.epoch += 1
        await until_health(200)
        async with aiohttp.ClientSession() as session, session.get(url + "/nodes") as answer:
            (told,) = (await answer.json())["nodes"]
        assert (told["epoch"], told["healthy"], told["restarts"], told["down_s"]) == (8, True, 1, None)


def test_a_key_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("\n")
    assert cli.run(parse("--decode", D, "--cluster-key-file", str(tmp_path / "key"))) == 2
    assert "empty" in capsys.readouterr().err
