"""The laboratory: what measures the library, reproduces the papers' tables, and is never installed."""
