"""What runs need, fetched, converted and verified before they start."""
