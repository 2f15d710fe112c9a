"""DNABERT-S: tokenizer, network, weights, and the encoder that combines them."""
