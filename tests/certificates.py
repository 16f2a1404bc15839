"""Certificates that sign themselves, as docs/security.md makes one."""

import ssl
import subprocess
from pathlib import Path

from cryptography import x509

OPENSSL = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def certify(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name` and 127.0.0.1, and its key, in place of those that the folder may have."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    new = [folder / "new-certificate", folder / "new-key"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    command = [*OPENSSL, "-days", "2", *names, "-out", new[0], "-keyout", new[1]]
    subprocess.run(command, check=True, capture_output=True)
    new[1].replace(key)  # between these two the files are no pair, which must not matter
    new[0].replace(certificate)
    return certificate, key


def name_of(port: int) -> str:
    """The common name in the certificate of the server."""
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=10)
    return x509.load_pem_x509_certificate(pem.encode()).subject.rfc4514_string().removeprefix("CN=")
