"""Objects on a pool of servers, each placed by its key."""
