"""The operators' view: metrics, logs, health, pages."""

from kvtide.server.observe.access import ACCESS_LOGGER, AUDIT_LOGGER, AccessLog, write_log
from kvtide.server.observe.pages import PAGES, Health, Observability, Observatory
from kvtide.server.observe.status import Outlook

__all__ = [
    "ACCESS_LOGGER",
    "AUDIT_LOGGER",
    "PAGES",
    "AccessLog",
    "Health",
    "Observability",
    "Observatory",
    "Outlook",
    "write_log",
]
