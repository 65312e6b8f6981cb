"""The cache server: tiers over HTTP, byte-fair between tenants."""
