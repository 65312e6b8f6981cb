"""Regions and their records: what may change about stored objects, and the centre that says so."""
