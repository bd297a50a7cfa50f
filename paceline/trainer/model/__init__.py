"""Models, and what one rank computes of them."""
