"""How an encoder and its head are made from labelled FASTA, and what they are worth."""
