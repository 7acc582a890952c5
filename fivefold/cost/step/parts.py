"""What a job costs, in bytes and seconds: the same arithmetic for one layout and for a million."""

COMPUTE = ("products", "attention", "experts", "elementwise", "head")  # parts of a step's compute
