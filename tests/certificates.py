"""Certificates for tests: an authority, and a certificate of 127.0.0.1 that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from pathlib import Path

PEM = serialization.Encoding.PEM
PLAIN = serialization.PrivateFormat.PKCS8
KEY_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class CertificateFiles(NamedTuple):
    ca: Path
    cert: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--tls-cert={self.cert}", f"--tls-key={self.key}", f"--tls-ca={self.ca}"


class Authority:
    """Writes files into `folder`."""

    def __init__(self, folder: Path, name: str = "the test's authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._certificate = self._sign(self._name, self._key.public_key(), is_ca=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._certificate.public_bytes(PEM))

    def issue(self, name: str = "node", passphrase: bytes = b"", dns: str = "") -> CertificateFiles:
        """A new key and its certificate, in the same files each time. `dns`: its only name, no address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        files = CertificateFiles(self.ca, self._folder / f"{name}.pem", self._folder / f"{name}.key")
        sealed = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(PEM, PLAIN, sealed))
        files.cert.write_bytes(self._sign(subject, key.public_key(), is_ca=False, dns=dns).public_bytes(PEM))
        return files

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool, dns: str = ""
    ) -> x509.Certificate:
        here: list[x509.GeneralName] = [
            x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        ]  # fmt: skip
        # ssl.create_default_context() of Python 3.13 demands these of a chain (RFC 5280), and the uses of an authority
        own = x509.SubjectKeyIdentifier.from_public_key(key)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        uses = dict.fromkeys(KEY_USES, False) | {
            "key_cert_sign": is_ca,
            "crl_sign": is_ca,
            "digital_signature": not is_ca,
        }
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**uses), critical=True)
            .add_extension(own, critical=False)
            .add_extension(signer, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)] if dns else here), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())
