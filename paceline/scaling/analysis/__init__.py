"""What measured groups of nodes say: efficiency by cause, slow nodes, what to measure next."""
