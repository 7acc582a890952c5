"""Floor 1: pure values. Nothing here imports torch; plan and run both speak this language."""
