"""Where onepass meets other packages. Nothing of theirs is imported before it is used."""
