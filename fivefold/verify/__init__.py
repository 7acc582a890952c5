"""A plan run by many ranks and compared with one process."""
