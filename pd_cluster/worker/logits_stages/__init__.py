"""What changes logits before a token is drawn from them: one file per stage, in the order that `order` declares."""
