"""The bridge to transformers: attention, experts, loading, self-check."""
