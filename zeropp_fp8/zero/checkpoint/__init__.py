"""A checkpoint counts when every rank's files are on the disk, and what is damaged is named."""
