"""Whole decoder layers with few launches: proving that a layer is one, and running it so."""

from __future__ import annotations
