"""Reports: documents, their renderers (terminal, Markdown, CSV, HTML) and charts."""
