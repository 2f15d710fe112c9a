"""DNABERT-S: tokenizer, network, weights, and the encoder that joins them."""
