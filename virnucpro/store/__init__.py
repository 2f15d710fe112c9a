"""The run folder: plan, finished work, and lock."""
