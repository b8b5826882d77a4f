"""Cross-entropy, of logits and of what they are made of."""
