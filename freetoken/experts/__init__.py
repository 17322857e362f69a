"""Expert weights that need not fit in GPU memory: layout, banks, slots, policy."""
