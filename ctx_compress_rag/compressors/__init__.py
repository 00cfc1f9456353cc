"""Compressors: text -> SoftContext, one module per method."""
