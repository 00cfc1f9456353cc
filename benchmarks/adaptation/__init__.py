"""Tables of RAG-GD and its baselines."""
