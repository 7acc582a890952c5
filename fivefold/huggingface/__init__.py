"""Hugging Face model folders, read and written."""
