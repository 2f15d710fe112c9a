"""Shared foundations: types, errors, recipe, atomic files, processes, options."""
