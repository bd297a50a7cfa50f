"""How the engines' log formats are read, where that takes more than one file."""
