"""What the commands run: indexing, asking, serving, upkeep and the demo."""
