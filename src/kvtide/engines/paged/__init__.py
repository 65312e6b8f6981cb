"""What connectors to paged engines share: pages to blocks and back, what to load and store, and whether it pays.

No engine is imported here: all of it is tested without one.
"""
