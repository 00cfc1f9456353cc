"""Turn retrieved texts into markers, at a ratio or within a token budget."""
