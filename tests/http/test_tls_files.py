"""Certificate files: what is refused, and what a change of the files does."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING

import pytest
import uvloop

from pd_http.errors import StartupError
from pd_http.limits import HttpLimits
from pd_http.tls import CertificateWatch
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.certificates import CertificateFiles


def test_without_a_certificate_there_is_no_tls() -> None:
    limits = HttpLimits()
    limits.check_tls()
    assert (limits.server_context(), limits.scheme) == (None, "http")


@pytest.mark.long
def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    other = Authority(tmp_path).issue("other")
    sealed = Authority(tmp_path).issue("sealed", b"passphrase")
    wrong = (
        (HttpLimits(tls_key=str(files.key)), "--tls-key needs --tls-cert"),
        (HttpLimits(tls_cert=str(tmp_path / "none")), "--tls-cert [^ ]*none: "),
        (HttpLimits(tls_cert=str(files.cert)), "--tls-cert"),
        (HttpLimits(tls_cert=str(files.cert), tls_key=str(other.key)), "--tls-key"),
        (HttpLimits(tls_cert=str(sealed.cert), tls_key=str(sealed.key)), "--tls-key"),
        (HttpLimits(tls_ca=str(files.key)), "--tls-ca"),
        (HttpLimits(tls_ca=str(tmp_path / "none")), "--tls-ca"),
        (HttpLimits(tls_name=".nodes"), "--tls-name '.nodes'"),
        (HttpLimits(tls_name="n" * 64), "--tls-name 'nnn"),
    )
    for limits, flag in wrong:
        with pytest.raises(StartupError, match=flag):
            limits.check_tls()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(("named", "is_accepted"), [("nodes", True), ("others", False), ("", False)])
def test_a_name_is_checked_where_urls_have_addresses(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], named: str, *, is_accepted: bool
) -> None:
    """As pods are called: by an address that their certificate does not have. uvloop has a TLS of its own."""
    files = Authority(tmp_path).issue(dns="nodes")
    server = HttpLimits(tls_cert=str(files.cert), tls_key=str(files.key)).server_context()
    client = HttpLimits(tls_ca=str(files.ca), tls_name=named).client_context()

    async def connect() -> None:
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        if is_accepted:
            runner.run(connect())
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                runner.run(connect())


@pytest.mark.long
def test_an_authority_that_is_not_ours_is_refused_whatever_the_name(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(dns="nodes")
    server = HttpLimits(tls_cert=str(files.cert), tls_key=str(files.key)).server_context()
    client = HttpLimits(tls_name="nodes").client_context()

    async def connect() -> None:
        async with await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server
        ) as listening:
            port = listening.sockets[0].getsockname()[1]
            await asyncio.open_connection("127.0.0.1", port, ssl=client)

    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        asyncio.run(connect())


@pytest.mark.long
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("name", ["", "localhost"])
def test_other_authorities_are_trusted_instead_of_the_first(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one client context all the time. A file that cannot be read leaves the authorities as they were."""
    caplog.set_level(logging.INFO, "pd_http")
    issued = []
    for folder in (tmp_path / "old", tmp_path / "new"):
        folder.mkdir()
        issued.append(Authority(folder, folder.name).issue())
    old, new = issued
    servers = {files: HttpLimits(tls_cert=str(files.cert), tls_key=str(files.key)).server_context() for files in issued}
    ca = tmp_path / "ca.pem"

    def write(content: bytes, time_ns: int) -> None:
        ca.write_bytes(content)
        os.utime(ca, ns=(time_ns, time_ns))  # a change, however coarse the file system's clock is

    write(old.ca.read_bytes(), 1)
    client = HttpLimits(tls_ca=str(ca), tls_name=name).client_context()

    async def is_trusted(files: CertificateFiles) -> bool:
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=servers[files])
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            except ssl.SSLCertVerificationError:
                return False
            writer.close()
            return True

    async def trusted() -> list[bool]:
        return [await is_trusted(files) for files in (old, new)]

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(trusted()) == [True, False]
        assert caplog.text == ""
        write(old.ca.read_bytes() + new.ca.read_bytes(), 2)
        assert runner.run(trusted()) == [True, True]
        write(new.ca.read_bytes(), 3)
        assert runner.run(trusted()) == [False, True]
        assert caplog.text.count("read again") == 2
        write(b"no certificate", 4)
        assert runner.run(trusted()) == [False, True]
        assert caplog.text.count("stay as they were") == 1
        ca.unlink()
        assert runner.run(trusted()) == [False, True]
        write(old.ca.read_bytes(), 5)
        assert runner.run(trusted()) == [True, False]


def test_a_certificate_is_read_again_and_a_bad_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pd_http")
    authority = Authority(tmp_path)
    files = authority.issue()
    limits = HttpLimits(tls_cert=str(files.cert), tls_key=str(files.key))
    context = limits.server_context()
    assert context is not None
    watch = CertificateWatch(limits, context)
    asyncio.run(watch.look())
    assert caplog.text == ""
    authority.issue()
    os.utime(files.cert, ns=(1, 1))  # a change, however coarse the file system's clock is
    asyncio.run(watch.look())
    assert "read again" in caplog.text
    caplog.clear()
    files.cert.write_text("not a certificate")
    asyncio.run(watch.look())
    asyncio.run(watch.look())
    assert caplog.text.count("stays as it was") == 1
