"""The run folder: the plan, the finished work, and the lock."""
