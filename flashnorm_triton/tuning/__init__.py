"""Tuning: how candidates are timed against each other (``measure``)."""
