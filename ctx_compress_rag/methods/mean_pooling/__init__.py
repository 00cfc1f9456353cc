"""Mean pooling."""
