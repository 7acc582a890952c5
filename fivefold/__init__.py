"""fivefold: transformers across five dimensions of parallelism, planned, verified and measured."""

__version__ = "0.1.0"
