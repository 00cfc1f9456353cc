"""Build an index from files, retrieve passages from it for questions, and run the demo."""

DEFAULT_BUNDLE = "smollm2-135m"  # the shipped bundle that reads English
DEFAULT_CHUNK_TOKENS = 256
MIN_CHUNK_TOKENS = 16
