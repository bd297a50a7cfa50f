"""What a rank finds out about itself and writes down."""
