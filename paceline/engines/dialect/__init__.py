"""How the engines' dialects are read, where that takes more than one file."""
