"""Clients as they come, with their own settings, against a node: Java's HttpClient, curl, Python's and Node's."""

from __future__ import annotations

import asyncio
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
BODY = '{"model":"demo","messages":[{"role":"user","content":"hi"}],"max_tokens":1%s}'
JAVA = """
import java.net.URI;
import java.net.http.*;
public class Ask {
  public static void main(String[] args) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    for (int round = 0; round < 3; round++) {
      HttpRequest request = HttpRequest.newBuilder(URI.create(args[0])).header("Content-Type", "application/json")
        .POST(HttpRequest.BodyPublishers.ofString(args[1])).build();
      HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.statusCode() + " " + answer.body());
    }
  }
}
"""
PYTHON = """
import http.client, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
client = http.client.HTTPConnection(url.hostname, url.port)
for _ in range(3):
    client.request("POST", url.path, iter([sys.argv[2].encode()]), {"Content-Type": "application/json"})
    answer = client.getresponse()
    print(answer.status, answer.read().decode())
"""
NODE = """
const [url, body] = process.argv.slice(1);
(async () => { for (let i = 0; i < 3; i++) {
  const answer = await fetch(url, {method: "POST", body, headers: {"Content-Type": "application/json"}});
  console.log(answer.status, await answer.text());
}})();
"""
JSON = "Content-Type: application/json"
CURL = {
    "http2": ["--http2"],
    "http1.0": ["--http1.0"],
    "expect": ["-H", "Expect: 100-continue"],
    "chunks": ["-H", "Transfer-Encoding: chunked", "--http2"],
    "compressed": ["--compressed"],
    "absolute": ["--request-target", "http://any.name/v1/chat/completions"],
}

CLIENT_DEADLINE_S = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), CLIENT_DEADLINE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return said.decode()


async def check(client: list[str], more: tuple[str, ...] = ("", ',"stream":true')) -> None:
    async with running(FakeEngine(says([5]))) as node:
        for fields in more:
            said = await output(*client, f"{node.url}/v1/chat/completions", BODY % fields)
            assert said.count("200 ") == said.count("[DONE]" if fields else '"chat.completion"') == 3, said


@pytest.mark.parametrize("options", CURL.values(), ids=CURL)
async def test_curl(options: list[str]) -> None:
    async with running(FakeEngine(says([5]))) as node:
        for fields in ("", ',"stream":true'):
            url = f"{node.url}/v1/chat/completions"
            said = await output(
                "curl", "-sS", "-w", "%{http_code} %{http_version}", "-H", JSON, "-d", BODY % fields, *options, url
            )
            assert said.endswith("200 1.1"), said
            assert ("[DONE]" if fields else '"chat.completion"') in said


async def test_java(tmp_path: Path) -> None:
    """Its default is HTTP/2, so that it offers h2c with each first request."""
    if shutil.which("javac") is None:
        pytest.skip("javac is not installed")
    source = tmp_path / "Ask.java"
    source.write_text(JAVA, encoding="utf-8")
    await check(["java", str(source)])


async def test_python() -> None:
    await check([sys.executable, "-c", PYTHON])


async def test_node() -> None:
    await check(["node", "-e", NODE])
