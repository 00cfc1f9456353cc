"""Plots of what the methods attend to."""
