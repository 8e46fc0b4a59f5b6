"""AdamW on master weights and moments in any format, and norms of codes."""
