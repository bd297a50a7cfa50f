"""The mesh of ranks, what they exchange, and what is split over them."""
