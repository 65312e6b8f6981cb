"""What leaves first, of whatever holds bytes: policies over prefixes, rankings of single objects."""
