"""`ft serve`: starts the three processes, watches them, ends them together. Loads no torch."""
