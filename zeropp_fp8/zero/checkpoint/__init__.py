"""A checkpoint counts when every rank's files are on the disk, and what is damaged is named.

commit.py    saving in two phases
manifest.py  which files there are, and what is in them
check.py     what is wrong is said on all ranks, before one of them looks for a file that is not there
"""
