"""The demo model: a real small dense model upcycled into an MoE checkpoint."""
