"""Turn retrieved texts into markers and sentences, at a ratio or within a token budget."""
