"""Reports of one run: terminal, HTML page, tables and charts, all from one RunReport."""
