"""Sources of assets; each kind lists its files or fetches the asset itself."""
