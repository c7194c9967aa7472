"""Reports: text, JSON, HTML and traces, computed from records alone."""
