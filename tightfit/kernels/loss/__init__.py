"""The output projection and the loss of its logits, also beside a teacher's, without holding all logits."""
