"""Show traces as text, pictures and pages, and export them to other viewers."""
