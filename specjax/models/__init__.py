"""What a model is, and the one decoder that all families are configurations of."""
