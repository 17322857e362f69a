"""The scheduler process owns numbers: requests, prefix cache, pages, admission, step plans."""
