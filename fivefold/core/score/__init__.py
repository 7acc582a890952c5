"""Estimates held against runs that somebody measured."""
