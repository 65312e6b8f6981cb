"""What tests of servers share."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server.worlds import World


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for localhost and a client's, by openssl."""
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.fixture
def world(tmp_path: Path, stack: ExitStack) -> World:
    """Two regions and their centre."""
    return World(tmp_path, stack)
