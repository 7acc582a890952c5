"""Training data: text to token shards, and token shards to samples in an order that is the same on
every layout."""
