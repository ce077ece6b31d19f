"""TLS: the gateway's own certificate, and whom it trusts for its engines."""

from __future__ import annotations

import ssl
from pathlib import Path

from gateway.settings import Settings, SettingsError, Tls


def server_context(tls: Tls) -> ssl.SSLContext | None:
    """None where the gateway speaks plain http. SettingsError for files that can't be used."""
    if tls.cert is None or tls.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, tls.cert, tls.key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Connections that come from now on get this one."""
    _having(cert, "tls.cert", "CERTIFICATE", "a certificate")
    _having(key, "tls.key", "PRIVATE KEY", "a private key")
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(
            f"settings: tls.key: {key} does not fit the certificate in {cert}, or is encrypted "
            f"({error}); give the certificate's own key, not encrypted"
        ) from None


def client_context(backend: str, ca: Path | None) -> ssl.SSLContext | None:
    """Trusts the authorities in a backend's `ca` alone; None: those that the system trusts."""
    if ca is None:
        return None
    field = f"backends.{backend}.ca"
    _having(ca, field, "CERTIFICATE", "certificates of authorities")
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise SettingsError(
            f"settings: {field}: {ca} can't be used ({error}); give a PEM file with certificates "
            "of authorities"
        ) from None


def check(settings: Settings) -> None:
    """SettingsError for the first file that can't be used."""
    server_context(settings.tls)
    for name, backend in settings.backends.items():
        client_context(name, backend.ca)


def _having(path: Path, field: str, label: str, what: str) -> None:
    remedy = f"give a PEM file with {what}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"settings: {field}: {path} can't be read: {error.strerror}; {remedy}"
        ) from None
    if f"{label}-----".encode() not in content:
        raise SettingsError(f"settings: {field}: {path} has no {label} in PEM form; {remedy}")
