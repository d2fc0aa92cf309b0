"""TLS by certificate files: of this server, and of the nodes that it calls."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass

from pd_http.errors import StartupError
from pd_http.settings import setting

log = logging.getLogger("pd_http")
FileState = tuple[int, int, int]  # time of the last change, size, inode


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files in PEM. Without --tls-cert the server speaks plain HTTP."""

    tls_cert: str = setting("", "Serve HTTPS with this certificate, its chain after it. Followed.", metavar="FILE")
    tls_key: str = setting("", "Private key of --tls-cert. Default: it is in the same file.", metavar="FILE")
    tls_ca: str = setting(
        "",
        "Certificates of the authorities that sign the nodes' (https:// URLs). Default: the system's. Followed.",
        metavar="FILE",
    )  # fmt: skip
    tls_name: str = setting(
        "", "The name in the nodes' certificates, where their URLs have addresses. Default: that of each URL.",
        metavar="NAME",
    )  # fmt: skip

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    def check_tls(self) -> None:
        """Raises StartupError if a file, or the name, cannot be used."""
        self.server_context()
        if self.tls_ca or self.tls_name:
            self.client_context()

    def server_context(self) -> ssl.SSLContext | None:
        """Of the server; None: it speaks plain HTTP. Raises StartupError."""
        if not self.tls_cert:
            if self.tls_key:
                raise StartupError("--tls-key needs --tls-cert")
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            self.load(context)
        except (OSError, ssl.SSLError) as error:
            key = f" --tls-key {self.tls_key}" if self.tls_key else ""
            raise StartupError(f"cannot use --tls-cert {self.tls_cert}{key}: {error}") from error
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read the certificate: new connections have it. Raises OSError, ssl.SSLError.

        A key with a passphrase is refused: OpenSSL would ask for it at the terminal.
        """
        context.load_cert_chain(self.tls_cert, self.tls_key or None, password=lambda: b"")

    def client_context(self) -> ssl.SSLContext:
        """For https:// URLs of nodes. In event loops it follows changes of --tls-ca. Raises StartupError."""
        try:
            if not self.tls_ca and not self.tls_name:
                return ssl.create_default_context()
            context = _NodeContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
            context.begin(self)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"cannot use --tls-ca {self.tls_ca}: {error}") from error
        self._check_name(context)
        return context

    def load_authorities(self, context: ssl.SSLContext) -> None:
        """Let `context` trust what signs the nodes' certificates. Raises OSError, ssl.SSLError."""
        if self.tls_ca:
            context.load_verify_locations(self.tls_ca)
        else:
            context.load_default_certs()

    def _check_name(self, context: ssl.SSLContext) -> None:
        """Raises StartupError for a name that no connection could ask for: it would fail in the event loop."""
        try:
            context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="node")
        except ValueError as error:  # a leading dot, or what is no host name
            raise StartupError(f"--tls-name {self.tls_name!r} is no name of a certificate: {error}") from error


class _NodeContext(ssl.SSLContext):
    """Of connections to nodes. Each trusts the authorities that --tls-ca has when it begins.

    With --tls-name it demands a certificate of that name, whatever the URL says: pods have addresses and no names.
    A context cannot forget an authority, so a changed file is read into a new one, which makes the connections.
    For event loops: they use `wrap_bio`. A blocking client's `wrap_socket` trusts the first authorities, and checks the
    URL's name.
    """

    _files: TlsFiles
    _seen: FileState | None  # of --tls-ca
    _newest: ssl.SSLContext

    def begin(self, files: TlsFiles) -> None:
        """Call it once, before anything else. Raises OSError, ssl.SSLError."""
        self._files = files
        self._seen = _state_of(files.tls_ca)
        self._newest = self._read()
        files.load_authorities(self)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        if self._files.tls_ca:
            self._look()
        name = self._files.tls_name or server_hostname
        return self._newest.wrap_bio(incoming, outgoing, server_side, name, session)

    def _look(self) -> None:
        """Read the file if it has changed. A bad one changes nothing."""
        state = _state_of(self._files.tls_ca)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._newest = self._read()
        except (OSError, ssl.SSLError) as error:
            log.error("--tls-ca %s: %s; the authorities stay as they were", self._files.tls_ca, error)
        else:
            log.info("--tls-ca %s: read again", self._files.tls_ca)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._files.load_authorities(context)
        return context


class CertificateWatch:
    """Reads the certificate again when its files change. Call `look` periodically."""

    def __init__(self, files: TlsFiles, context: ssl.SSLContext) -> None:
        self._files = files
        self._context = context
        self._seen = self._state()

    async def look(self) -> None:
        """New connections have the new certificate. A bad one changes nothing."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        trial = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            self._files.load(trial)  # a key that does not fit would leave half of it in the context in use
            self._files.load(self._context)
        except (OSError, ssl.SSLError) as error:
            log.error("--tls-cert %s: %s; the certificate stays as it was", self._files.tls_cert, error)
        else:
            log.info("--tls-cert %s: read again", self._files.tls_cert)

    def _state(self) -> list[FileState | None]:
        return [_state_of(path) for path in (self._files.tls_cert, self._files.tls_key) if path]


def _state_of(path: str) -> FileState | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
