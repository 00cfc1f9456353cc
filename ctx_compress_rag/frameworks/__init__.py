"""Bases of every framework's LLM and postprocessor classes."""
