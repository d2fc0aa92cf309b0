"""TLS by certificate files: of this server, and of the nodes that it calls."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass

from pd_http.errors import StartupError
from pd_http.settings import setting

log = logging.getLogger("pd_http")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files in PEM. Without --tls-cert the server speaks plain HTTP."""

    tls_cert: str = setting("", "Serve HTTPS with this certificate, its chain behind it. Followed.", metavar="FILE")
    tls_key: str = setting("", "Private key of --tls-cert. Default: it is in the same file.", metavar="FILE")
    tls_ca: str = setting(
        "", "Certificates of the authorities that sign the nodes' (https:// URLs). Default: the system's.",
        metavar="FILE",
    )  # fmt: skip

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    def check_tls(self) -> None:
        """Raises StartupError if a file cannot be used."""
        self.server_context()
        if self.tls_ca:
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
            raise StartupError(f"cannot use --tls-cert {self.tls_cert} --tls-key {self.tls_key}: {error}") from error
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read the certificate: new connections have it. Raises OSError, ssl.SSLError.

        A key with a passphrase is refused: OpenSSL would ask for it at the terminal.
        """
        context.load_cert_chain(self.tls_cert, self.tls_key or None, password=lambda: b"")

    def client_context(self) -> ssl.SSLContext:
        """For https:// URLs of nodes. Raises StartupError."""
        try:
            return ssl.create_default_context(cafile=self.tls_ca or None)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"cannot use --tls-ca {self.tls_ca}: {error}") from error


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

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(path) for path in (self._files.tls_cert, self._files.tls_key) if path]


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
