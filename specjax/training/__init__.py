"""Training of drafts for a target: its own texts, its hidden states, heads and draft models distilled from it."""
