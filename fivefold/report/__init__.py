"""Values to pictures, sentences and pages; knows `core` and nothing above it."""
