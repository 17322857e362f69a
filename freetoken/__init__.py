"""FreeToken serves Mixture-of-Experts language models larger than the GPU memory."""
