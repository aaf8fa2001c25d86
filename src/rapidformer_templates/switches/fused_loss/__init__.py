"""The loss of a language model without its logits: the head's product and the cross-entropy in one operation."""
