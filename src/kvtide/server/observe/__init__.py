"""What operators see: metrics, logs, health, pages."""

from kvtide.server.observe.access import ACCESS_LOGGER, AUDIT_LOGGER, AccessLog, write_log
from kvtide.server.observe.health import Health
from kvtide.server.observe.outlook import Outlook
from kvtide.server.observe.pages import PAGES, Observatory, Pages

__all__ = [
    "ACCESS_LOGGER",
    "AUDIT_LOGGER",
    "PAGES",
    "AccessLog",
    "Health",
    "Observatory",
    "Outlook",
    "Pages",
    "write_log",
]
