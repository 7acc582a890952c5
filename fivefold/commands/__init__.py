"""One module a command: its options, its function of the Python API, and what it prints."""
