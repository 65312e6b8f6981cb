"""Measurements of kvtide: benches, simulators, judges of quality. The product never imports it."""
