"""Public test helpers: conformance suites that every codec, tier and policy must pass, and hypothesis strategies."""
