"""One fault after another is put into a copy of the package; a test has to see each."""
