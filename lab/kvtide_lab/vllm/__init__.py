"""Real vLLM in processes of its own, for benches and tests."""
