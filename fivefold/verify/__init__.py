"""A plan run by many ranks, held against one process."""
