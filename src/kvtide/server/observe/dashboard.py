"""The dashboard: one page without anything from elsewhere. It polls `/v1/status` and draws what it gets."""

from __future__ import annotations

from importlib.resources import files

# Content-Security-Policy of the page: its own script and style, and requests to its own server.
DASHBOARD_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DASHBOARD_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", DASHBOARD_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)


def dashboard_page() -> bytes:
    """Return the page."""
    return files("kvtide.server").joinpath("dashboard.html").read_bytes()
