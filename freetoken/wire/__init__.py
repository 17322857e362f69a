"""What crosses a process boundary: messages, their bytes, and the sockets that carry them."""
