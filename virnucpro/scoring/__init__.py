"""Vectors to calls: the head, and the rules that join its scores."""
