"""Regions and their records: what may change about stored objects, and the centre that says so."""

from kvtide.server.regions.records import Records
from kvtide.server.regions.regions import Latest, Region, RegionSettings, centre_of, region_of, stored_quality
from kvtide.server.regions.requests import RecordRequests

__all__ = [
    "Latest",
    "RecordRequests",
    "Records",
    "Region",
    "RegionSettings",
    "centre_of",
    "region_of",
    "stored_quality",
]
