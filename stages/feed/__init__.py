"""Turns a finished cache into training steps: rows, their order, and their rank."""
