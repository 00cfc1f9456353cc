"""An invented world, whose facts no decoder knows, and a tiny decoder that reads it."""
