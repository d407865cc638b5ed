"""Show a trace: pictures, and files for other viewers."""
