"""Models and heads on disk: what is read, what is written, and what is fetched."""
