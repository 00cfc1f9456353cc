"""Scores, baselines of equal budget, and plots."""
