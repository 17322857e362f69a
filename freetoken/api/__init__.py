"""The api process owns text: HTTP, templates, tokenizer, detokenizer, stop strings."""
