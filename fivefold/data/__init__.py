"""Text to rows of tokens, in an order that no layout changes."""
