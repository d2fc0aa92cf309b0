"""Logits stages: changes to the logits before a token is drawn. `order` declares the order of the stages."""
