"""A decoder transformer in plain PyTorch. It runs on one device and knows no rank."""
