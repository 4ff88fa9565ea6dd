"""Peers of the decode benchmark: how each is installed, and how its own Python measures it."""
