"""Tables and sentences of the documentation, made of result files: no figure is copied by hand.

A document marks where a block goes, `<!-- block: NAME -->` to `<!-- end -->`; `BLOCKS` in the file of its topic says
which function makes it of which results. The source, with the commit, is written below each block.
`configuration.py` alone takes no results: it prints docs/configuration.md from the models of the section.
"""
