"""A foreign log: gathered while it is read, put in order, completed, and held against itself."""
