"""Panels that explain one thing each, on a small example that the reader can change."""
