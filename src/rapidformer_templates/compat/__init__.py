"""Other libraries' interfaces over the templates: scripts that were written for them run with one changed import."""
