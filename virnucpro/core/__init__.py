"""Words and machine: nouns, errors, recipe, whole files, processes, devices, options."""
