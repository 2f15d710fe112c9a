"""Who calls a record: scorer, head, both; and its regions."""
