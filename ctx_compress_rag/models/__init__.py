"""A decoder with adapters, and a sentence encoder: load, identify, run."""
