"""What every language model does with its embedding and its logits."""
