"""What of README and docs/ is made from result files and from the code: one file a page or two."""
