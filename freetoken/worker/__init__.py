"""The worker process owns bytes: weights, expert banks, KV tensors, forwards, sampling."""
