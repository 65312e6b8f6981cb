"""What operators see: metrics, logs, health, pages."""
