"""The whole model in Hugging Face's format, with no rank holding it."""
