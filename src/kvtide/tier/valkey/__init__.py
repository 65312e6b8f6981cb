"""Objects on Valkey."""
