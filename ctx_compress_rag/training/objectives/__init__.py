"""Objectives: what the stages of training minimise, each with the collator that feeds it."""
