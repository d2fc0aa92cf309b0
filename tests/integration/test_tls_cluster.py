"""Real nodes and a router over TLS with API keys: handoffs in both orders, the feed, and no key in any process."""

from __future__ import annotations

import ssl
import time
from hashlib import sha256
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pd_router.admission.api_keys import new_key
from tests.certificates import Authority
from tests.cluster import Launcher
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.slow]
BODY = {"model": "demo_model", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("name", ["", "demo-pd-cluster-nodes"], ids=["by address", "by one name, as pods are"])
def test_a_cluster_over_tls(tmp_path: Path, name: str) -> None:
    authority = Authority(tmp_path)
    files, public = authority.issue(dns=name), authority.issue("public")
    at_nodes = (*files.flags, f"--tls-name={name}")
    key, line = new_key("one")
    (tmp_path / "keys").write_text(line)
    context = ssl.create_default_context(cafile=files.ca)
    headers = {"authorization": f"Bearer {key}"}
    with Launcher() as launcher:
        p = launcher.node("prefill", *at_nodes, wait=False)
        d = launcher.node("decode", *at_nodes, "--min-remote-tokens=1", wait=False)
        urls = f"--prefill={p.url}", f"--decode={d.url}"
        keys = f"--api-keys={tmp_path / 'keys'}"
        flags = (*public.flags, f"--tls-name={name}", "--prefill-on-decode=never")
        router = launcher.command("router", "--port=0", *urls, *flags, keys)
        with httpx.Client(base_url=router.url, verify=context, timeout=HANG_S) as client:
            ends_s = time.monotonic() + HANG_S
            while {node["load"]["feed"] for node in client.get("/nodes").json()["nodes"]} != {"live"}:
                assert time.monotonic() < ends_s
                time.sleep(0.1)
            texts = []
            for order in ("p-first", "d-first"):
                body = BODY | {"prompt": "Once upon a time there was a " + "very " * 100, "cache_salt": order}
                answer = client.post("/v1/completions", json=body, headers=headers | {"x-pd-route": order})
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-pd-prefill"] != answer.headers["x-pd-decode"], (order, p.output, d.output)
                texts.append(answer.json()["choices"][0]["text"])
            assert texts[0] == texts[1]
            assert client.post("/v1/completions", json=BODY | {"prompt": "x"}).status_code == 401
            told = [client.get("/metrics").text, client.get("/nodes").text]
            told += [httpx.get(f"{node.url}/metrics", verify=False).text for node in (p, d)]
            listing = launcher.command("nodes", "list", f"--router={router.url}", f"--tls-ca={files.ca}")
            assert listing.wait() == 0
        told += [process.output for process in (p, d, router, listing)]
        for launched in (p, d, router):
            told += [" ".join(process.cmdline()) for process in psutil.Process(launched.pid).children(recursive=True)]
    for text in told:
        assert key not in text
        assert sha256(key.encode()).hexdigest() not in text
