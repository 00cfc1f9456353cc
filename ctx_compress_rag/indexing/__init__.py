"""What the commands run: from files to an index, questions about it, and the demo."""

DEFAULT_BUNDLE = "smollm2-135m"
"""The shipped bundle that reads English."""
DEFAULT_CHUNK_TOKENS = 256
MIN_CHUNK_TOKENS = 16
