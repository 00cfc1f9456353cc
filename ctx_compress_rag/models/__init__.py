"""A transformers decoder with adapters: load, identify, run."""
