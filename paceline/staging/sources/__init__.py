"""Where assets come from: each kind says what it consists of, or fetches itself."""
